"""The time of an unmeasured group, extrapolated from the measured curve of another.

A curve is extrapolated, not a law, which preserves the bends of protocols. Across nodes, rings keep
the time of a step for its chunk on each card in use; trees keep their shape and grow by hops; an
all-to-all keeps the time per peer. NCCL's own figures supply the parts that one curve does not
identify (the launch, hops inside a node).

Between 2, 4 and 8 ranks of A100 and H100 in a node all-gathers, reduce-scatters, all-reduces and
all-to-alls differ, at every payload, by the latency of their steps and the bytes that they move:
all other costs of a payload (launch, change of protocol) are common to them, so that differences
transfer and ratios do not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..workload.collectives import Collective
from ._topology import CONGESTION_LOG, LOCAL_COPY_CHUNKS
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

Vector = NDArray[np.float64]
_MOST_BASE_FRAC = 0.9
"""Upper bound on the share of a time that does not grow with the steps."""
_TREE_BASE_S = 6.8e-6
_TREE_LOCAL_HOP_S = 0.6e-6
"""LL latencies from NCCL's cost model: the base, and a hop inside a node."""
_LARGE_NBYTES = np.array([2.0**40])
"""A payload of which only bandwidth counts."""
_HOP_RANGE_S = (0.5e-6, 50e-6)
"""Bounds of a hop's time: the shortest time of a curve that begins at large payloads does not
measure one."""
_NCCL_FRAC = 0.5
"""Weight of NCCL's own latency for a collective that another one stands in for (0.2 to 0.8 make
little difference on public tables)."""
_PAIR_FRAC = 0.8
"""Share of its card's rate that one pair of ranks reaches: sends and all-to-alls of two H100 on two
nodes move 36 to 41 GB/s, those of more ranks 47 to 49 on each card (nccl-tests)."""
_ALL_TO_ALL_COPY_CHUNKS = 0.25
"""``LOCAL_COPY_CHUNKS`` for an all-to-all, whose own part is copied concurrently with others: 2, 4
and 8 A100 and H100."""
_PEER_FRAC = 0.5
"""Latency per peer of an all-to-all over that of a ring's step, in the same tables."""


def is_comparable(seen: Group, wanted: Group) -> bool:
    """Return True if a measured group is informative on another: both inside a node, or both across
    nodes."""
    return (seen.num_nodes > 1) == (wanted.num_nodes > 1)


def extrapolated_log_time(
    curve: Curve, seen: Group, wanted: Group, nbytes: Vector, prior: NetworkPrior
) -> Vector:
    """Return the log seconds of ``wanted``, ``(rows,)``, from the curve of ``seen``.

    All-reduce across nodes uses the cheaper of ring and tree. Another collective uses NCCL's own
    ratio: for rings, of the number of steps per chunk, otherwise of the whole time.
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
        # Large payloads may take a tree between two nodes, and a ring between more.
        ring_s = ring_s / against_ring_frac(seen, links) * against_ring_frac(wanted, links)
        ring_s = np.minimum(ring_s, _tree(curve, seen, wanted, nbytes, links))
    return np.log(ring_s)


def _drawn_to_nccl(log_time: Vector, wanted: Group, nbytes: Vector, links: LinkClass) -> Vector:
    """Shrink the log seconds of another collective than was measured to NCCL's figures,
    ``(rows,)``.

    Bandwidth follows the links, but half of the difference in latency is the collective's own (its
    algorithm, protocol, channels). A tree of 32 A100 on 8 nodes takes 37 to 46 us in 8 bytes, 40 by
    NCCL's figures alone, and 96 by their ratio to the gather there, whose ring takes 60 to 250.
    Gathers and their reverse use the same algorithms and are not shrunk.
    """
    priced = TunedTime(group=wanted, links=links)
    waits = 1.0 - bandwidth_share(priced, nbytes)
    return log_time + _NCCL_FRAC * waits * (np.log(priced(nbytes)) - log_time)


def is_family(seen: Group, wanted: Group) -> bool:
    """Return True if both are rings, or the same collective."""
    rings = {seen.collective, wanted.collective} <= RINGS
    return rings or seen.collective is wanted.collective


def _against_ring(group: Group, nbytes: Vector, links: LinkClass) -> Vector:
    """Return NCCL's expected time over that of the best ring, ``(rows,)``."""
    costs = tuner_costs(group, nbytes, links)
    rings = [cost for (way, _), cost in costs.items() if way is Algorithm.RING]
    if not rings or group.collective is Collective.ALL_TO_ALL:
        return np.ones(len(nbytes))
    least = np.min([cost.time_s(nbytes) for cost in rings], axis=0)
    return np.min([cost.time_s(nbytes) for cost in costs.values()], axis=0) / least


def against_ring_frac(group: Group, links: LinkClass) -> float:
    """Return NCCL's expected time of a large payload over that of a ring: below 1 if a tree between
    two nodes is faster.

    >>> from .systems import network_prior
    >>> group = Group(collective=Collective.ALL_REDUCE, num_ranks=8, num_nodes=2)
    >>> round(against_ring_frac(group, network_prior("h100").links), 2)
    0.62
    """
    return float(_against_ring(group, _LARGE_NBYTES, links)[0])


def chunk_nbytes(group: Group, nbytes: Vector) -> Vector:
    """Return the bytes that one ring step moves.

    >>> group = Group(collective=Collective.ALL_REDUCE, num_ranks=8)
    >>> chunk_nbytes(group, np.array([64.0])).tolist()
    [8.0]
    """
    steps = ring_steps(group.collective, group.num_ranks)
    return nbytes * bus_factor(group.collective, group.num_ranks) / steps


def same_chunk_nbytes(
    seen: Group, wanted: Group, nbytes: Vector, links: LinkClass | None = None
) -> Vector:
    """Return payloads of ``seen`` whose ring steps move as much as those of ``wanted`` over each
    link.

    >>> two, eight = (Group(collective=Collective.ALL_GATHER, num_ranks=n) for n in (2, 8))
    >>> same_chunk_nbytes(two, eight, np.array([64.0])).tolist()
    [16.0]
    """
    width = 1.0
    if links is not None:
        width = link_bytes_per_s(wanted, links) / link_bytes_per_s(seen, links)
    return chunk_nbytes(wanted, nbytes) / chunk_nbytes(seen, np.ones(1)) / width


def _ring(curve: Curve, seen: Group, wanted: Group, nbytes: Vector, prior: NetworkPrior) -> Vector:
    """Return the time of the ring's steps of the same chunk, plus the launch.

    To the extent that bandwidth bounds it, each collective also takes the time of its own chunk,
    once.
    """
    source = same_chunk_nbytes(seen, wanted, nbytes, prior.links)
    times = np.exp(curve.log_time_of(source))
    base = np.minimum(prior.base_s, _MOST_BASE_FRAC * times)
    steps = [ring_steps(group.collective, group.num_ranks) for group in (seen, wanted)]
    growth: float | Vector = steps[1] / steps[0]
    if prior.links is not None:
        share = bandwidth_share(TunedTime(group=seen, links=prior.links), source)
        copy_chunks = [local_copy_chunks(group, prior.links) for group in (seen, wanted)]
        worked = (steps[1] + copy_chunks[1]) / (steps[0] + copy_chunks[0])
        is_wider = seen.ranks_per_node != wanted.ranks_per_node and wanted.num_nodes > 1
        if is_wider and {seen.collective, wanted.collective} <= RINGS:
            growth = _latency_s(wanted, nbytes, prior.links)
            growth /= _latency_s(seen, source, prior.links)
        growth = share * worked + (1.0 - share) * growth
    return base + growth * (times - base)


def link_bytes_per_s(group: Group, links: LinkClass) -> float:
    """Return the rate of all rings together; for a send, that of one card between nodes, or of its
    links inside a node."""
    if group.collective not in PAIRS:
        return links.bus_bytes_per_s(group)
    if group.num_nodes > 1:
        return links.send_bytes_per_s(group)
    return links.node_bytes_per_s * links.topology.node_share(2)


def _latency_s(group: Group, nbytes: Vector, links: LinkClass) -> Vector:
    """Return NCCL's expected latency of the best ring before its first byte, ``(rows,)``."""
    costs = tuner_costs(group, nbytes, links)
    rings = [cost for (way, _), cost in costs.items() if way is Algorithm.RING]
    rings = rings or list(costs.values())
    times = np.array([cost.time_s(nbytes) for cost in rings])
    latencies = [np.broadcast_to(cost.latency_s, nbytes.shape) for cost in rings]
    return np.choose(np.argmin(times, axis=0), latencies)


def _tree(curve: Curve, seen: Group, wanted: Group, nbytes: Vector, links: LinkClass) -> Vector:
    """Return the time of a tree; the shortest measured time gives that of a hop between nodes.

    Without pipelining the whole time grows with the hops; with it, hops are added, and bytes grow
    with the nodes that a card serves. Payloads lie between, so that the geometric mean is used.
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
    """Return the time of an all-to-all; local peers are served concurrently with far ones, which
    wait for their turn."""
    far = [_far_peers(g) for g in (seen, wanted)]
    width = links.card_bytes_per_s(wanted) / links.card_bytes_per_s(seen)
    doublings = np.log2(wanted.num_nodes / seen.num_nodes)
    times = np.exp(curve.log_time_of(nbytes * seen.num_ranks / wanted.num_ranks / width))
    base = np.minimum(all_to_all_base_s(wanted.num_nodes), _MOST_BASE_FRAC * times)
    share = bandwidth_share(TunedTime(group=wanted, links=links), nbytes)
    crowded = np.exp(CONGESTION_LOG * doublings * share)
    return base + far[1] / far[0] * crowded * (times - base)


def _far_peers(group: Group) -> float:
    """Return the peers behind the network; a single one counts for more, since its two channels do
    not fill a card."""
    far = group.num_ranks - group.ranks_per_node
    return far if far > 1.0 else far / _PAIR_FRAC


def _in_node(
    curve: Curve, seen: Group, wanted: Group, nbytes: Vector, prior: NetworkPrior
) -> Vector:
    """Return the seconds of ``wanted``, ``(rows,)``, from the curve of ``seen``, both in one node.

    A negative difference is applied as a ratio instead, which keeps times positive.
    """
    times = np.exp(curve.log_time_of(nbytes))
    before, after = (_in_node_law_s(group, nbytes, prior) for group in (seen, wanted))
    return np.where(
        after > before,
        times + after - before,
        times * (prior.base_s + after) / (prior.base_s + before),
    )


def _in_node_law_s(group: Group, nbytes: Vector, prior: NetworkPrior) -> Vector:
    """Return the seconds of steps and bytes without a launch, ``(rows,)``: of the ring, or of the
    switch if it reduces faster."""
    assert prior.links is not None
    links, steps = prior.links, float(ring_steps(group.collective, group.num_ranks))
    if group.collective in PAIRS:
        return prior.step_s + nbytes / link_bytes_per_s(group, links)
    chunks = steps + local_copy_chunks(group, links)
    if group.collective is Collective.ALL_TO_ALL:
        steps *= _PEER_FRAC
    ring = steps * prior.step_s + chunks * nbytes / group.num_ranks / links.bus_bytes_per_s(group)
    switch = switch_cost(group, links)
    return ring if switch is None else np.minimum(ring, switch.time_s(nbytes))


def local_copy_chunks(group: Group, links: LinkClass) -> float:
    """Return the chunks that a group copies in addition to its steps; fewer in a mesh and across
    nodes, whose links are slower but not the copy.

    >>> from .systems import network_prior
    >>> two = Group(collective=Collective.ALL_GATHER, num_ranks=2)
    >>> local_copy_chunks(two, network_prior("h100").links)
    0.4
    """
    if group.collective in PAIRS:
        return 0.0
    share = links.bus_bytes_per_s(group) / links.node_bytes_per_s
    is_swap = group.collective is Collective.ALL_TO_ALL
    return (_ALL_TO_ALL_COPY_CHUNKS if is_swap else LOCAL_COPY_CHUNKS) * share
