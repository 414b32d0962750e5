"""A group inside a node from another one there: what their steps and bytes differ by is added.

Between 2, 4 and 8 ranks of A100 and H100 all-gathers, reduce-scatters, all-reduces and all-to-alls
differ, at every payload, by the latency of their steps and the bytes that they move: whatever else
a payload costs (launch, change of protocol) it costs in each, so that a difference carries over
where a ratio does not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..workload.collectives import Collective
from .curves import Curve
from .groups import PAIRS, RINGS, Group, ring_steps
from .nccl_tuner import LinkClass, switch_cost
from .systems import NetworkPrior
from .topology import OWN_CHUNKS

Vector = NDArray[np.float64]
_OWN_SWAPPED = 0.25
"""The same of an all-to-all, whose own part is copied beside others: 2, 4 and 8 A100 and H100."""
_SHORT_NBYTES = 2**14
"""Up to here a payload in a node is latency alone: NCCL's LL sends 8 KiB a channel at once."""
_PRIOR_STEPS = 4.0
"""Steps that the device's latency counts for: a launch scatters by as much as some steps take."""
_LEAST_STEP_FRAC = 0.5
"""Of the device's latency the measured one is, at least: the launch takes the rest."""
_PEER_FRAC = 0.5
"""Latency of a peer of an all-to-all over that of a ring's step, in the same tables."""


def in_node_time_s(
    curve: Curve, seen: Group, wanted: Group, nbytes: Vector, prior: NetworkPrior
) -> Vector:
    """Seconds of ``wanted``, ``(rows,)``, from the curve of ``seen``, both in one node.

    A difference that would have to be taken away is a ratio instead, which leaves something.
    """
    assert prior.links is not None
    times = np.exp(curve.log_time_of(nbytes))
    step_s = _step_s(curve, seen, prior)
    before, after = (
        in_node_law_s(group, nbytes, prior.links, step_s=step_s) for group in (seen, wanted)
    )
    return np.where(
        after > before,
        times + after - before,
        times * (prior.base_s + after) / (prior.base_s + before),
    )


def _step_s(curve: Curve, seen: Group, prior: NetworkPrior) -> float:
    """Latency of a step: the device's, and what the shortest payloads of a ring say of it."""
    if seen.collective not in RINGS or curve.log_nbytes[0] > np.log(_SHORT_NBYTES):
        return prior.step_s
    steps = ring_steps(seen.collective, seen.num_ranks)
    found = max(curve.least_time_s - prior.base_s, _LEAST_STEP_FRAC * prior.step_s * steps) / steps
    weight = steps / (steps + _PRIOR_STEPS)
    return float(prior.step_s ** (1.0 - weight) * found**weight)


def in_node_law_s(group: Group, nbytes: Vector, links: LinkClass, *, step_s: float) -> Vector:
    """Seconds of steps and bytes without a launch, ``(rows,)``: of the ring, or of the switch where
    it reduces faster."""
    steps = float(ring_steps(group.collective, group.num_ranks))
    if group.collective in PAIRS:
        rate = links.node_bytes_per_s * links.topology.node_share(2)
        return step_s + nbytes / rate
    chunks = steps + own_chunks(group, links)
    if group.collective is Collective.ALL_TO_ALL:
        steps *= _PEER_FRAC
    ring = steps * step_s + chunks * nbytes / group.num_ranks / links.bus_bytes_per_s(group)
    switch = switch_cost(group, links)
    return ring if switch is None else np.minimum(ring, switch.time_s(nbytes))


def own_chunks(group: Group, links: LinkClass) -> float:
    """Chunks beside those of the steps; the copy is as fast as ever where links are slower, so that
    it counts for less in a mesh and across nodes.

    >>> from .systems import network_prior
    >>> two = Group(collective=Collective.ALL_GATHER, num_ranks=2)
    >>> own_chunks(two, network_prior("h100").links)
    0.4
    """
    if group.collective in PAIRS:
        return 0.0
    share = links.bus_bytes_per_s(group) / links.node_bytes_per_s
    is_swap = group.collective is Collective.ALL_TO_ALL
    return (_OWN_SWAPPED if is_swap else OWN_CHUNKS) * share
