"""The time of a group that was not measured, from the measured curve of another.

A curve is carried, not a law: bends of protocols come along.  Rings keep the time of a step for
its chunk; trees keep their shape and grow by hops; an all-to-all keeps the time for a peer.  NCCL's
own figures stand for what one curve cannot tell (the launch, hops inside a node, the switch).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..workload.collectives import Collective
from .curves import Curve
from .groups import Group, bus_factor, ring_steps
from .nccl_tuner import Algorithm, LinkClass, Protocol, all_to_all_base_s, tuner_costs, tuner_time_s
from .systems import NetworkPrior

Vector = NDArray[np.float64]
_MOST_BASE_FRAC = 0.9
"""Share of a time that does not grow with the steps, at most."""
_TREE_BASE_S = 6.8e-6
_TREE_LOCAL_HOP_S = 0.6e-6
"""Both LL, from NCCL's cost model."""
_HOP_RANGE_S = (0.5e-6, 50e-6)
"""Shortest times of curves that begin at large payloads say nothing of a hop."""
_GROWTH_WEIGHT = 0.8
"""Weight of the growth that was measured over that of the law."""
_GROWTH_RANGE = (0.0, 2.0)
"""Measured growth over that of the law: never backwards, never more than twice."""
_LEAST_GROWTH_LOG = 0.02
"""A law that grows by less has no ratio to measured growth worth taking."""
_NEAR_OCTAVES = (-2, -1, 0, 1, 2)
"""Payloads within a factor of four, over which growth is averaged: one would have its noise."""
_SWITCH = (Algorithm.NVLS, Protocol.SIMPLE)


def is_comparable(seen: Group, wanted: Group) -> bool:
    """Whether a measured group says anything of another: both inside a node, or both across."""
    return (seen.num_nodes > 1) == (wanted.num_nodes > 1)


def extrapolated_log_time(
    curve: Curve, seen: Group, wanted: Group, nbytes: Vector, prior: NetworkPrior
) -> Vector:
    """Log seconds of ``wanted``, ``(rows,)``, from the curve of ``seen``.

    All-reduce across nodes takes the cheaper of ring and tree; inside a node with a reducing switch
    also that (NCCL's figure).
    """
    if prior.links is None:
        return np.log(_ring(curve, seen, wanted, nbytes, 0.0))
    if seen.collective is wanted.collective is Collective.ALL_TO_ALL:
        return np.log(_all_to_all(curve, seen, wanted, nbytes))
    times = [_ring(curve, seen, wanted, nbytes, prior.base_s)]
    if seen.collective is wanted.collective is Collective.ALL_REDUCE:
        if wanted.num_nodes > 1:
            times.append(_tree(curve, seen, wanted, nbytes))
        elif wanted.num_ranks > seen.num_ranks:
            times += _switch(seen, wanted, nbytes, prior)
    return np.log(np.min(times, axis=0))


def ratio_log_time(
    curve: Curve, seen: Group, wanted: Group, nbytes: Vector, links: LinkClass
) -> Vector:
    """Log seconds of ``wanted``, ``(rows,)``: the curve of ``seen`` times NCCL's ratio of both."""
    priced = [tuner_time_s(group, nbytes, links) for group in (seen, wanted)]
    return curve.log_time_of(nbytes) + np.log(priced[1] / priced[0])


def grown_log_time(
    curves: tuple[Curve, Curve],
    seen: tuple[Group, Group],
    wanted: Group,
    nbytes: Vector,
    prior: NetworkPrior,
) -> Vector:
    """Log seconds of ``wanted``, ``(rows,)``, from two groups on one side of it in size.

    How much the second exceeds the first, over how much the law says, around each payload, holds
    for the next step as well.
    """
    near = (nbytes * 2.0 ** np.array(_NEAR_OCTAVES)[:, None]).ravel()
    first, second = (curve.log_time_of(near) for curve in curves)
    priced = extrapolated_log_time(curves[0], seen[0], seen[1], near, prior)
    shape = (len(_NEAR_OCTAVES), len(nbytes))
    grew = (second - first).reshape(shape).sum(axis=0)
    law = (priced - first).reshape(shape).sum(axis=0)
    least = _LEAST_GROWTH_LOG * len(_NEAR_OCTAVES)
    law = np.where(np.abs(law) < least, np.copysign(least, law), law)
    growth = 1.0 + _GROWTH_WEIGHT * (np.clip(grew / law, *_GROWTH_RANGE) - 1.0)
    start = curves[1].log_time_of(nbytes)
    end = extrapolated_log_time(curves[1], seen[1], wanted, nbytes, prior)
    return start + growth * (end - start)


def chunk_nbytes(group: Group, nbytes: Vector) -> Vector:
    """Bytes that one ring step moves.

    >>> group = Group(collective=Collective.ALL_REDUCE, num_ranks=8)
    >>> chunk_nbytes(group, np.array([64.0])).tolist()
    [8.0]
    """
    steps = ring_steps(group.collective, group.num_ranks)
    return nbytes * bus_factor(group.collective, group.num_ranks) / steps


def same_chunk_nbytes(seen: Group, wanted: Group, nbytes: Vector) -> Vector:
    """Payloads of ``seen`` whose ring steps move as much as those of ``wanted``.

    >>> two, eight = (Group(collective=Collective.ALL_GATHER, num_ranks=n) for n in (2, 8))
    >>> same_chunk_nbytes(two, eight, np.array([64.0])).tolist()
    [16.0]
    """
    return chunk_nbytes(wanted, nbytes) / chunk_nbytes(seen, np.ones(1))


def _ring(curve: Curve, seen: Group, wanted: Group, nbytes: Vector, base_s: float) -> Vector:
    times = np.exp(curve.log_time_of(same_chunk_nbytes(seen, wanted, nbytes)))
    base = np.minimum(base_s, _MOST_BASE_FRAC * times)
    steps = ring_steps(wanted.collective, wanted.num_ranks)
    return base + steps / ring_steps(seen.collective, seen.num_ranks) * (times - base)


def _tree(curve: Curve, seen: Group, wanted: Group, nbytes: Vector) -> Vector:
    """Hops between nodes are as long as the shortest measured time says.

    Unpipelined, all of a time grows as the hops do; pipelined, hops come on top, and bytes grow
    with the nodes that a card serves.  Payloads lie between: the geometric mean of both.
    """
    measured_s = curve.least_time_s - _TREE_BASE_S - _local_hops_s(seen)
    hop_s = float(np.clip(measured_s / (2.0 * np.log2(seen.num_nodes)), *_HOP_RANGE_S))
    first, last = (
        _TREE_BASE_S + _local_hops_s(g) + 2.0 * np.log2(g.num_nodes) * hop_s for g in (seen, wanted)
    )
    times = np.exp(curve.log_time_of(nbytes))
    share = (1.0 - 1.0 / wanted.num_nodes) / (1.0 - 1.0 / seen.num_nodes)
    pipelined = last + share * np.maximum(times - first, 0.0)
    return np.sqrt(last / first * times * pipelined)


def _local_hops_s(group: Group) -> float:
    return 2.0 * (group.ranks_per_node - 1.0) * _TREE_LOCAL_HOP_S


def _switch(seen: Group, wanted: Group, nbytes: Vector, prior: NetworkPrior) -> list[Vector]:
    """Time in the reducing switch, where ``wanted`` uses it and ``seen`` did not."""
    assert prior.links is not None
    costs = [tuner_costs(group, nbytes, prior.links) for group in (seen, wanted)]
    if _SWITCH in costs[0] or _SWITCH not in costs[1]:
        return []
    return [costs[1][_SWITCH].time_s(nbytes)]


def _all_to_all(curve: Curve, seen: Group, wanted: Group, nbytes: Vector) -> Vector:
    """Inside a node all peers are served at once; across nodes far ones wait for their turn."""
    if wanted.num_nodes == 1:
        least = curve.least_time_s
        times = np.exp(curve.log_time_of(nbytes))
        share = bus_factor(wanted.collective, wanted.num_ranks)
        share /= bus_factor(seen.collective, seen.num_ranks)
        return np.minimum(least, times) + share * np.maximum(times - least, 0.0)
    far = [g.num_ranks - g.ranks_per_node for g in (seen, wanted)]
    times = np.exp(curve.log_time_of(nbytes * seen.num_ranks / wanted.num_ranks))
    base = np.minimum(all_to_all_base_s(wanted.num_nodes), _MOST_BASE_FRAC * times)
    return base + far[1] / far[0] * (times - base)
