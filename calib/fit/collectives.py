"""Transfer times of collectives: latency per ring step, and bandwidth of the busiest link.

``time = step_s * ring_steps + nbytes * bus_factor / bus_bytes_per_s`` for every collective and
group size, so that one that was never measured follows from those that were.  A group that was
measured has constants of its own, drawn to the machine's, and a correction by payload between the
measured ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..workload.collectives import Collective, CollectiveCall, GroupRole
from .priors import NetworkPrior
from .robust import robust_minimum
from .training import Measured

Group = tuple[Collective, GroupRole, int]
_SAMPLE_SIGMA_LOG = 0.1
_MACHINE_SIGMA_LOG = 1.0
_GROUP_SIGMA_LOG = 0.6
_PAIRS = frozenset({Collective.SEND, Collective.RECV})
_LEAST_NBYTES = 1.0
_BOUND_WEIGHT = 0.1
"""Weight of a transfer that is known from above only."""


def bus_factor(collective: Collective, num_ranks: int) -> float:
    """Bytes over the busiest link per byte of payload, as nccl-tests counts it.

    >>> bus_factor(Collective.ALL_REDUCE, 8), bus_factor(Collective.ALL_GATHER, 4)
    (1.75, 0.75)
    >>> bus_factor(Collective.SEND, 2)
    1.0
    """
    if num_ranks < 2:
        return 0.0
    share = (num_ranks - 1) / num_ranks
    if collective is Collective.ALL_REDUCE:
        return 2.0 * share
    if collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL):
        return share
    return 1.0


def ring_steps(collective: Collective, num_ranks: int) -> int:
    """Latencies in a row of a ring: 2(n-1) for all-reduce, 1 for a send, else n-1.

    >>> ring_steps(Collective.ALL_REDUCE, 4), ring_steps(Collective.BROADCAST, 4)
    (6, 3)
    """
    if num_ranks < 2:
        return 0
    if collective in _PAIRS:
        return 1
    return (num_ranks - 1) * (2 if collective is Collective.ALL_REDUCE else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Constants of one group or of the whole machine."""

    step_s: float
    bus_bytes_per_s: float

    def time_s(self, collective: Collective, num_ranks: int, nbytes: float) -> float:
        """Seconds of one transfer.

        >>> link = Link(step_s=1e-5, bus_bytes_per_s=1e9)
        >>> round(link.time_s(Collective.ALL_REDUCE, 2, 1_000_000), 9)
        0.00102
        """
        return (
            ring_steps(collective, num_ranks) * self.step_s
            + bus_factor(collective, num_ranks) * nbytes / self.bus_bytes_per_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupModel:
    """One collective in one role and group size, as far as it was measured."""

    link: Link
    log_nbytes: NDArray[np.float64]
    correction: NDArray[np.float64]
    """Log of measured over modelled time at each measured payload."""
    held_out: NDArray[np.float64]
    num_rows: int

    def log_time(self, group: Group, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Log seconds, ``(rows,)``; outside the measured payloads the nearest correction holds."""
        collective, _, num_ranks = group
        law = np.log([self.link.time_s(collective, num_ranks, n) for n in nbytes])
        logs = np.log(np.maximum(nbytes, _LEAST_NBYTES))
        return law + np.interp(logs, self.log_nbytes, self.correction)

    def octaves_outside(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Doublings between a payload and the measured ones."""
        logs = np.log(np.maximum(nbytes, _LEAST_NBYTES))
        below = np.maximum(self.log_nbytes[0] - logs, 0.0)
        return (below + np.maximum(logs - self.log_nbytes[-1], 0.0)) / np.log(2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveModel:
    """All groups of a run; ``machine`` stands in for what was never measured."""

    machine: Link
    groups: Mapping[Group, GroupModel]
    is_measured: bool
    """False where nothing was recorded and ``machine`` is the prior."""

    def nearest(self, group: Group) -> Group | None:
        """The measured group that stands in: same collective first, then same role, near size."""
        if group in self.groups:
            return group
        collective, role, num_ranks = group
        ranked = sorted(
            self.groups,
            key=lambda g: (
                g[0] is not collective,
                g[1] is not role,
                abs(np.log(g[2] / num_ranks)),
                g[0].value,
                g[1].value,
            ),
        )
        return ranked[0] if ranked else None

    def link(self, group: Group) -> Link:
        """Constants by which the group's transfers are timed."""
        nearest = self.nearest(group)
        return self.groups[nearest].link if nearest else self.machine


def canonical(call: CollectiveCall) -> CollectiveCall:
    """The call as samples hold it: a receive is the other end of a send between two ranks."""
    if call.collective in _PAIRS:
        return replace(call, collective=Collective.SEND, num_ranks=2)
    return call


def group_of(call: CollectiveCall) -> Group:
    """The group whose samples speak for a canonical call."""
    return call.collective, call.role, call.num_ranks


def fit_collectives(
    measured: Mapping[CollectiveCall, Measured], prior: NetworkPrior
) -> CollectiveModel:
    """Machine constants over all samples, then those of each group around them."""
    rows = _by_group(measured)
    start = Link(step_s=prior.step_s, bus_bytes_per_s=prior.bus_bytes_per_s)
    if not rows:
        return CollectiveModel(machine=start, groups={}, is_measured=False)
    ordered = sorted(rows, key=lambda g: (g[0].value, g[1].value, g[2]))
    machine = _fit_link([_columns(g, rows[g]) for g in ordered], start, _MACHINE_SIGMA_LOG)
    groups = {group: _fit_group(group, rows[group], machine) for group in ordered}
    return CollectiveModel(machine=machine, groups=groups, is_measured=True)


def _by_group(
    measured: Mapping[CollectiveCall, Measured],
) -> dict[Group, list[tuple[int, Measured]]]:
    """Payloads and times; bounds only for groups that have no exact transfer."""
    rows: defaultdict[Group, list[tuple[int, Measured]]] = defaultdict(list)
    for call, found in measured.items():
        if call.num_ranks > 1:
            rows[group_of(canonical(call))].append((call.nbytes, found))
    exact = {group: [row for row in found if not row[1].is_bound] for group, found in rows.items()}
    return {
        group: exact[group]
        or [(n, replace(m, weight=_BOUND_WEIGHT * m.weight)) for n, m in rows[group]]
        for group in rows
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Samples of one group, ``(rows,)`` each."""

    steps: NDArray[np.float64]
    bus_nbytes: NDArray[np.float64]
    nbytes: NDArray[np.float64]
    log_time: NDArray[np.float64]
    weight: NDArray[np.float64]

    def only(self, keep: NDArray[np.bool_]) -> _Columns:
        """The rows of a mask."""
        return replace(
            self,
            steps=self.steps[keep],
            bus_nbytes=self.bus_nbytes[keep],
            nbytes=self.nbytes[keep],
            log_time=self.log_time[keep],
            weight=self.weight[keep],
        )


def _columns(group: Group, rows: Sequence[tuple[int, Measured]]) -> _Columns:
    rows = sorted(rows, key=lambda row: (row[0], row[1].time_s))
    nbytes = np.array([n for n, _ in rows], dtype=np.float64)
    return _Columns(
        steps=np.full(len(rows), float(ring_steps(group[0], group[2]))),
        bus_nbytes=nbytes * bus_factor(group[0], group[2]),
        nbytes=nbytes,
        log_time=np.log([m.time_s for _, m in rows]),
        weight=np.sqrt([m.weight for _, m in rows]),
    )


def _fit_group(group: Group, rows: Sequence[tuple[int, Measured]], machine: Link) -> GroupModel:
    columns = _columns(group, rows)
    link = _fit_link([columns], machine, _GROUP_SIGMA_LOG)
    index = np.arange(len(rows))
    held_out = [
        _residuals(columns, _fit_link([columns.only(index != i)], machine, _GROUP_SIGMA_LOG))[i]
        for i in index
        if len(index) > 1
    ]
    return GroupModel(
        link=link,
        log_nbytes=np.log(np.maximum(columns.nbytes, _LEAST_NBYTES)),
        correction=_residuals(columns, link),
        held_out=np.array(held_out),
        num_rows=sum(m.num_rows for _, m in rows),
    )


def _residuals(columns: _Columns, link: Link) -> NDArray[np.float64]:
    law = columns.steps * link.step_s + columns.bus_nbytes / link.bus_bytes_per_s
    return columns.log_time - np.log(law)


def _fit_link(parts: Sequence[_Columns], prior: Link, sigma_log: float) -> Link:
    """Robust least squares in log time, with the prior's constants as one more sample each."""
    steps = np.concatenate([p.steps for p in parts])
    bus_nbytes = np.concatenate([p.bus_nbytes for p in parts])
    log_time = np.concatenate([p.log_time for p in parts])
    scale = np.concatenate([p.weight for p in parts]) / _SAMPLE_SIGMA_LOG
    start = np.log([prior.step_s, 1.0 / prior.bus_bytes_per_s])

    def residuals(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        step_s, byte_s = np.exp(theta)
        data = np.log(steps * step_s + bus_nbytes * byte_s) - log_time
        return np.concatenate([data * scale, (theta - start) / sigma_log])

    def jacobian(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        costs = np.column_stack([steps, bus_nbytes]) * np.exp(theta)
        shares = costs / costs.sum(axis=1, keepdims=True)
        return np.concatenate([shares * scale[:, None], np.eye(2) / sigma_log])

    step_s, byte_s = np.exp(robust_minimum(residuals, jacobian, start))
    return Link(step_s=float(step_s), bus_bytes_per_s=float(1.0 / byte_s))
