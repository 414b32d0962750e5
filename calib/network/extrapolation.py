"""The time of a group that was not measured, from the measured curve of another.

A curve is carried, not a law: bends of protocols come along.  Across nodes rings keep the time of
a step for its chunk on each card in use; trees keep their shape and grow by hops; an all-to-all
keeps the time for a peer.  NCCL's own figures stand for what one curve cannot tell (the launch,
hops inside a node).

Between 2, 4 and 8 ranks of A100 and H100 in a node all-gathers, reduce-scatters, all-reduces and
all-to-alls differ, at every payload, by the latency of their steps and the bytes that they move:
whatever else a payload costs (launch, change of protocol) it costs in each, so that a difference
carries over where a ratio does not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..workload import Collective
from .curves import Curve, bandwidth_share
from .groups import PAIRS, RINGS, Group, bus_factor, ring_steps
from .nccl_tuner import (
    GATHERS,
    Algorithm,
    LinkClass,
    TunedTime,
    all_to_all_base_s,
    switch_cost,
    tuner_costs,
)
from .once_per_node import exchange_time_s
from .systems import NetworkPrior
from .topology import CONGESTION_LOG, OWN_CHUNKS

Vector = NDArray[np.float64]
_MOST_BASE_FRAC = 0.9
"""Share of a time that does not grow with the steps, at most."""
_TREE_BASE_S = 6.8e-6
_TREE_LOCAL_HOP_S = 0.6e-6
"""Both LL, from NCCL's cost model."""
_HOP_RANGE_S = (0.5e-6, 50e-6)
"""Shortest times of curves that begin at large payloads say nothing of a hop."""
_NCCL_FRAC = 0.5
"""Share of NCCL's own latency in that of a collective which another one stands in for (with 0.2 to
0.8 public tables differ little)."""
_PAIR_FRAC = 0.8
"""Of its card's rate what one pair of ranks reaches: sends and all-to-alls of two H100 on two nodes
move 36 to 41 GB/s, those of more ranks 47 to 49 on each card (nccl-tests)."""
_OWN_SWAPPED = 0.25
"""``OWN_CHUNKS`` of an all-to-all, whose own part is copied beside others: 2, 4 and 8 A100 and
H100."""
_PEER_FRAC = 0.5
"""Latency of a peer of an all-to-all over that of a ring's step, in the same tables."""


def is_comparable(seen: Group, wanted: Group) -> bool:
    """Whether a measured group says anything of another: both inside a node, or both across."""
    return (seen.num_nodes > 1) == (wanted.num_nodes > 1)


def extrapolated_log_time(
    curve: Curve, seen: Group, wanted: Group, nbytes: Vector, prior: NetworkPrior
) -> Vector:
    """Log seconds of ``wanted``, ``(rows,)``, from the curve of ``seen``.

    All-reduce across nodes takes the cheaper of ring and tree.  Of another collective NCCL's own
    ratio is taken: of rings how often they pass a chunk on, of all others the whole.
    """
    links = prior.links
    if links is None:
        return np.log(_ring(curve, seen, wanted, nbytes, prior))
    if wanted.num_nodes == 1:
        return np.log(_in_node(curve, seen, wanted, nbytes, prior))
    if seen.num_chosen and wanted.num_chosen:
        return np.log(exchange_time_s(curve, seen, wanted, nbytes, links))
    if seen.collective is wanted.collective is Collective.ALL_TO_ALL:
        return np.log(_all_to_all(curve, seen, wanted, nbytes, links))
    if not is_family(seen, wanted):
        priced = [TunedTime(group=group, links=links)(nbytes) for group in (seen, wanted)]
        by_ratio = curve.log_time_of(nbytes) + np.log(priced[1] / priced[0])
        return _drawn_to_nccl(by_ratio, wanted, nbytes, links)
    ring_s = _ring(curve, seen, wanted, nbytes, prior)
    if seen.collective is not wanted.collective:
        source = same_chunk_nbytes(seen, wanted, nbytes, links)
        against = _against_ring(wanted, nbytes, links) / _against_ring(seen, source, links)
        by_ratio = np.log(ring_s * against)
        if {seen.collective, wanted.collective} == GATHERS:
            return by_ratio
        return _drawn_to_nccl(by_ratio, wanted, nbytes, links)
    if seen.collective is Collective.ALL_REDUCE and Algorithm.TREE not in links.without:
        ring_s = np.minimum(ring_s, _tree(curve, seen, wanted, nbytes, links))
    return np.log(ring_s)


def _drawn_to_nccl(log_time: Vector, wanted: Group, nbytes: Vector, links: LinkClass) -> Vector:
    """Log seconds of another collective than was measured, ``(rows,)``: bandwidth is the links',
    but what latency differs by is half that collective's own (its algorithm, protocol, channels).

    A tree of 32 A100 on 8 nodes takes 37 to 46 us in 8 bytes, 40 by NCCL's figures alone, and 96 by
    their ratio to the gather there, whose ring takes 60 to 250.  Gathers and their reverse go the
    same ways, and tell all of each other.
    """
    priced = TunedTime(group=wanted, links=links)
    waits = 1.0 - bandwidth_share(priced, nbytes)
    return log_time + _NCCL_FRAC * waits * (np.log(priced(nbytes)) - log_time)


def is_family(seen: Group, wanted: Group) -> bool:
    """Whether both are rings, or the same collective."""
    rings = {seen.collective, wanted.collective} <= RINGS
    return rings or seen.collective is wanted.collective


def _against_ring(group: Group, nbytes: Vector, links: LinkClass) -> Vector:
    """Time that NCCL expects over that of the best ring, ``(rows,)``."""
    costs = tuner_costs(group, nbytes, links)
    rings = [cost for (way, _), cost in costs.items() if way is Algorithm.RING]
    if not rings or group.collective is Collective.ALL_TO_ALL:
        return np.ones(len(nbytes))
    least = np.min([cost.time_s(nbytes) for cost in rings], axis=0)
    return np.min([cost.time_s(nbytes) for cost in costs.values()], axis=0) / least


def chunk_nbytes(group: Group, nbytes: Vector) -> Vector:
    """Bytes that one ring step moves.

    >>> group = Group(collective=Collective.ALL_REDUCE, num_ranks=8)
    >>> chunk_nbytes(group, np.array([64.0])).tolist()
    [8.0]
    """
    steps = ring_steps(group.collective, group.num_ranks)
    return nbytes * bus_factor(group.collective, group.num_ranks) / steps


def same_chunk_nbytes(
    seen: Group, wanted: Group, nbytes: Vector, links: LinkClass | None = None
) -> Vector:
    """Payloads of ``seen`` whose ring steps move as much as those of ``wanted`` over each link.

    >>> two, eight = (Group(collective=Collective.ALL_GATHER, num_ranks=n) for n in (2, 8))
    >>> same_chunk_nbytes(two, eight, np.array([64.0])).tolist()
    [16.0]
    """
    width = 1.0
    if links is not None:
        width = link_bytes_per_s(wanted, links) / link_bytes_per_s(seen, links)
    return chunk_nbytes(wanted, nbytes) / chunk_nbytes(seen, np.ones(1)) / width


def _ring(curve: Curve, seen: Group, wanted: Group, nbytes: Vector, prior: NetworkPrior) -> Vector:
    """As many steps of the same chunk as the ring has, beside the launch.

    Where bandwidth counts each collective also takes the time of its own chunk, once.
    """
    source = same_chunk_nbytes(seen, wanted, nbytes, prior.links)
    times = np.exp(curve.log_time_of(source))
    base = np.minimum(prior.base_s, _MOST_BASE_FRAC * times)
    steps = [ring_steps(group.collective, group.num_ranks) for group in (seen, wanted)]
    growth: float | Vector = steps[1] / steps[0]
    if prior.links is not None:
        share = bandwidth_share(TunedTime(group=seen, links=prior.links), source)
        own = [own_chunks(group, prior.links) for group in (seen, wanted)]
        worked = (steps[1] + own[1]) / (steps[0] + own[0])
        is_wider = seen.ranks_per_node != wanted.ranks_per_node and wanted.num_nodes > 1
        if is_wider and {seen.collective, wanted.collective} <= RINGS:
            growth = _latency_s(wanted, nbytes, prior.links)
            growth /= _latency_s(seen, source, prior.links)
        growth = share * worked + (1.0 - share) * growth
    return base + growth * (times - base)


def link_bytes_per_s(group: Group, links: LinkClass) -> float:
    """Of all rings together; of a send between nodes one card, of one inside a node its links."""
    if group.collective not in PAIRS:
        return links.bus_bytes_per_s(group)
    if group.num_nodes > 1:
        return links.send_bytes_per_s(group)
    return links.node_bytes_per_s * links.topology.node_share(2)


def _latency_s(group: Group, nbytes: Vector, links: LinkClass) -> Vector:
    """What NCCL expects of the best ring before its first byte, ``(rows,)``."""
    costs = tuner_costs(group, nbytes, links)
    rings = [cost for (way, _), cost in costs.items() if way is Algorithm.RING]
    rings = rings or list(costs.values())
    times = np.array([cost.time_s(nbytes) for cost in rings])
    latencies = [np.broadcast_to(cost.latency_s, nbytes.shape) for cost in rings]
    return np.choose(np.argmin(times, axis=0), latencies)


def _tree(curve: Curve, seen: Group, wanted: Group, nbytes: Vector, links: LinkClass) -> Vector:
    """Hops between nodes are as long as the shortest measured time says.

    Unpipelined, all of a time grows as the hops do; pipelined, hops come on top, and bytes grow
    with the nodes that a card serves.  Payloads lie between: the geometric mean of both.
    """
    measured_s = curve.least_time_s - _TREE_BASE_S - _local_hops_s(seen)
    hop_s = float(np.clip(measured_s / (2.0 * np.log2(seen.num_nodes)), *_HOP_RANGE_S))
    first, last = (
        _TREE_BASE_S + _local_hops_s(g) + 2.0 * np.log2(g.num_nodes) * hop_s for g in (seen, wanted)
    )
    width = links.bus_bytes_per_s(wanted) / links.bus_bytes_per_s(seen)
    times = np.exp(curve.log_time_of(nbytes / width))
    share = (1.0 - 1.0 / wanted.num_nodes) / (1.0 - 1.0 / seen.num_nodes)
    pipelined = last + share * np.maximum(times - first, 0.0)
    return np.sqrt(last / first * times * pipelined)


def _local_hops_s(group: Group) -> float:
    return 2.0 * (group.ranks_per_node - 1.0) * _TREE_LOCAL_HOP_S


def _all_to_all(
    curve: Curve, seen: Group, wanted: Group, nbytes: Vector, links: LinkClass
) -> Vector:
    """Peers of the own node are served beside far ones, which wait for their turn."""
    far = [_far_peers(g) for g in (seen, wanted)]
    width = links.card_bytes_per_s(wanted) / links.card_bytes_per_s(seen)
    doublings = np.log2(wanted.num_nodes / seen.num_nodes)
    times = np.exp(curve.log_time_of(nbytes * seen.num_ranks / wanted.num_ranks / width))
    base = np.minimum(all_to_all_base_s(wanted.num_nodes), _MOST_BASE_FRAC * times)
    share = bandwidth_share(TunedTime(group=wanted, links=links), nbytes)
    crowded = np.exp(CONGESTION_LOG * doublings * share)
    return base + far[1] / far[0] * crowded * (times - base)


def _far_peers(group: Group) -> float:
    """Peers behind the network; one alone counts for more, since its two channels do not fill a
    card."""
    far = group.num_ranks - group.ranks_per_node
    return far if far > 1.0 else far / _PAIR_FRAC


def _in_node(
    curve: Curve, seen: Group, wanted: Group, nbytes: Vector, prior: NetworkPrior
) -> Vector:
    """Seconds of ``wanted``, ``(rows,)``, from the curve of ``seen``, both in one node.

    A difference that would have to be taken away is a ratio instead, which leaves something.
    """
    times = np.exp(curve.log_time_of(nbytes))
    before, after = (_in_node_law_s(group, nbytes, prior) for group in (seen, wanted))
    return np.where(
        after > before,
        times + after - before,
        times * (prior.base_s + after) / (prior.base_s + before),
    )


def _in_node_law_s(group: Group, nbytes: Vector, prior: NetworkPrior) -> Vector:
    """Seconds of steps and bytes without a launch, ``(rows,)``: of the ring, or of the switch where
    it reduces faster."""
    assert prior.links is not None
    links, steps = prior.links, float(ring_steps(group.collective, group.num_ranks))
    if group.collective in PAIRS:
        return prior.step_s + nbytes / link_bytes_per_s(group, links)
    chunks = steps + own_chunks(group, links)
    if group.collective is Collective.ALL_TO_ALL:
        steps *= _PEER_FRAC
    ring = steps * prior.step_s + chunks * nbytes / group.num_ranks / links.bus_bytes_per_s(group)
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
