"""Times before anything was measured: data-sheet rates and the cost model of the network.

Numpy only and without a fit, so that a training process can ask it between two steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..fit.batches import batch_of
from ..fit.estimates import Estimates, Source
from ..fit.laws import columns
from ..fit.priors import DevicePrior, device_prior
from ..network.groups import bus_factor, canonical, group_of, ring_steps
from ..network.nccl_tuner import tuner_time_s
from ..network.once_per_node import as_all_to_all
from ..workload.collectives import CollectiveCall
from ..workload.operators import Operator, OperatorKind, Phase

TRANSFER_SIGMA_LOG = 0.5
"""Error of a transfer's expected time: public tables scatter about NCCL's own figure by as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmeasured:
    """What is expected of a device by its name; implements ``fit.estimates.Estimator``."""

    device: str

    def operators(self, operators: Sequence[Operator]) -> Estimates:
        """Launches, FLOP and bytes one after the other, at 75 % of the data sheet."""
        prior = device_prior(self.device)
        times = np.zeros(len(operators))
        groups: defaultdict[tuple[OperatorKind, Phase, int], list[int]] = defaultdict(list)
        for i, operator in enumerate(operators):
            groups[operator.kind, operator.phase, operator.element_nbytes].append(i)
        for (_, _, nbytes), rows in groups.items():
            rates = prior.ceilings_for(nbytes)
            totals = columns(batch_of([operators[i] for i in rows])).totals()
            units = (rates.launch_s, 1.0 / rates.flop_per_s, 1.0 / rates.bytes_per_s)
            times[rows] = totals @ np.array(units)
        return Estimates(
            time_s=times,
            sigma_log=np.full(len(operators), prior.error_sigma_log),
            sources=(Source.PRIOR,) * len(operators),
        )

    def collectives(self, calls: Sequence[CollectiveCall]) -> Estimates:
        """NCCL's cost model, or a ring where another library carries the data."""
        prior = device_prior(self.device)
        return Estimates(
            time_s=np.array([_transfer_s(canonical(call), prior) for call in calls]),
            sigma_log=np.full(len(calls), TRANSFER_SIGMA_LOG),
            sources=(Source.PRIOR,) * len(calls),
        )


def _transfer_s(call: CollectiveCall, prior: DevicePrior) -> float:
    if call.num_ranks < 2:
        return 0.0
    network, group, nbytes = prior.network, group_of(call), float(call.nbytes)
    if group.num_chosen:
        group, share = as_all_to_all(group)
        nbytes *= share
    if network.links is not None:
        return float(tuner_time_s(group, np.array([nbytes]), network.links)[0])
    wire_s = bus_factor(group.collective, group.num_ranks) * nbytes / network.bus_bytes_per_s
    return ring_steps(group.collective, group.num_ranks) * network.step_s + wire_s
