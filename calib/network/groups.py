"""Measurements of one machine, the groups whose transfers share a curve, and a ring's bytes and
steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..regressors.estimate import Estimate
from ..workload.collectives import Collective, CollectiveCall, GroupRole

OTHER_OCTAVES = 1.0
"""Distance of another collective, role or machine: that of twice the ranks."""
_STRANGE_OCTAVES = 8.0
"""Distance between a ring and a collective that is none, which only NCCL's figures relate: farther
than any size."""
MOST_HOST_FRAC = 0.5
"""Share of waiting for the host above which an operator's time is not informative on the device."""
PAIRS = frozenset({Collective.SEND, Collective.RECV})
"""Transfers between two ranks."""
RINGS = frozenset(
    {
        Collective.ALL_REDUCE,
        Collective.ALL_GATHER,
        Collective.REDUCE_SCATTER,
        Collective.BROADCAST,
    }
)
"""Collectives that NCCL passes around a ring: any of them informs the others' links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A time measured on this run, with windows joined."""

    time_s: float
    sigma_log: float
    """Standard deviation of its logarithm between repeated measurements."""
    weight: float
    num_rows: int
    is_bound: bool = False
    """True for an upper bound: the transfer had ended before the first poll."""
    is_probe: bool = False
    """True if it was measured only between steps."""
    host_bound_frac: float = 0.0
    """Share of it in which the device waited for the host, which is not device time."""
    kernel_s: float = 0.0
    """Seconds of its kernels in a traced step, if it was host-bound; 0 if unknown."""
    host: Estimate | None = None
    """Seconds that the host takes to launch it; None if unknown."""

    @property
    def is_host_bound(self) -> bool:
        """True if most of it was waiting: it is then only an upper bound on the device's time."""
        return self.host_bound_frac > MOST_HOST_FRAC

    @property
    def device_s(self) -> float:
        """Time of the device itself; 0 if unknown."""
        return min(self.kernel_s, self.time_s) if self.is_host_bound else self.time_s

    @property
    def device_weight(self) -> float:
        """Weight of the device's time, reduced by the share of waiting."""
        return self.weight * (1.0 if self.is_host_bound else 1.0 - self.host_bound_frac)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One collective on a number of ranks and nodes."""

    collective: Collective
    num_ranks: int
    num_nodes: int = 1
    role: GroupRole = GroupRole.OTHER
    num_chosen: int = 0
    """Experts of each token, for an all-to-all that sends a token once to each node; 0 for all
    others and inside a node."""

    @property
    def name(self) -> str:
        """Name in reports.

        >>> Group(collective=Collective.SEND, num_ranks=2, role=GroupRole.PP).name
        'send/pp/2'
        """
        return f"{self.collective.value}/{self.role.value}/{self.num_ranks}"

    @property
    def order(self) -> tuple[str, str, int, int, int]:
        """Sort key of groups."""
        sizes = self.num_ranks, self.num_nodes, self.num_chosen
        return self.collective.value, self.role.value, *sizes

    @property
    def ranks_per_node(self) -> float:
        """Mean number of ranks over the nodes."""
        return self.num_ranks / self.num_nodes


def num_nodes(span: int, ranks_per_node: int | None) -> int:
    """Return the nodes of a group whose ranks extend over ``span`` consecutive ranks of a run.

    If the ranks per node are unknown, one node is assumed.

    >>> num_nodes(16, 8), num_nodes(9, 8), num_nodes(8, 8), num_nodes(64, None)
    (2, 2, 1, 1)
    """
    return -(-span // ranks_per_node) if ranks_per_node else 1


def canonical(call: CollectiveCall) -> CollectiveCall:
    """Return the call as samples have it: a receive is the other end of a send between two
    ranks."""
    if call.collective in PAIRS:
        return replace(call, collective=Collective.SEND, num_ranks=2)
    return call


def group_of(call: CollectiveCall) -> Group:
    """Return the group of a canonical call's samples."""
    return Group(
        collective=call.collective,
        num_ranks=call.num_ranks,
        num_nodes=call.num_nodes,
        role=call.role,
        num_chosen=call.num_chosen if call.num_nodes > 1 else 0,
    )


def bus_factor(collective: Collective, num_ranks: int) -> float:
    """Return the bytes over the busiest link per byte of payload, as nccl-tests counts it.

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
    """Return the successive latencies of a ring: 2(n-1) for all-reduce, 1 for a send, else n-1.

    >>> ring_steps(Collective.ALL_REDUCE, 4), ring_steps(Collective.BROADCAST, 4)
    (6, 3)
    """
    if num_ranks < 2:
        return 0
    if collective in PAIRS:
        return 1
    return (num_ranks - 1) * (2 if collective is Collective.ALL_REDUCE else 1)


def octaves_between(group: Group, other: Group) -> float:
    """Return the distance of a stand-in: doublings of nodes and of ranks per node, one for another
    role or another ring, more if exactly one of the two is a ring.

    >>> gather, reduce, swap = (Group(collective=c, num_ranks=8) for c in (
    ...     Collective.ALL_GATHER, Collective.ALL_REDUCE, Collective.ALL_TO_ALL))
    >>> octaves_between(gather, reduce), octaves_between(gather, swap)
    (1.0, 8.0)
    """
    # Rounded so that half and twice are exactly equidistant.
    sizes = round(sum(node_and_rank_octaves(group, other)), 9)
    return sizes + _kinds_apart(group, other)


def node_and_rank_octaves(group: Group, other: Group) -> tuple[float, float]:
    """Return the doublings between the nodes of two groups, and between the ranks per node."""
    nodes = abs(np.log2(group.num_nodes / other.num_nodes))
    return float(nodes), float(abs(np.log2(group.ranks_per_node / other.ranks_per_node)))


def _kinds_apart(group: Group, other: Group) -> float:
    apart = OTHER_OCTAVES * (group.role is not other.role)
    if bool(group.num_chosen) is not bool(other.num_chosen):
        return apart + _STRANGE_OCTAVES
    if group.collective is other.collective:
        return apart
    is_ring = {group.collective in RINGS, other.collective in RINGS}
    return apart + (OTHER_OCTAVES if is_ring == {True} else _STRANGE_OCTAVES)
