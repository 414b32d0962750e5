"""How far a transfer may lie from its estimate: half-widths of 90 % intervals, in log time.

Inside a curve from payloads that were left out of it (split conformal); beyond it and for other
groups from what such steps cost on public tables, scaled by what they cost between the measured
groups of this machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..regressors.intervals import Z_90, drawn_sigma_log, shrunk_sigma_log
from ..regressors.robust import without_wild
from .curves import Curve
from .groups import RINGS, Group, node_and_rank_octaves

Vector = NDArray[np.float64]
_FACTORS = (0.25, 8.0)
"""How far this machine's own errors may narrow or widen what public tables say: pairs that agree
say little of the next, since sizes that were measured are often those that a fabric was built for;
the worst one is not all."""
_PRIOR_PAIRS = 4.0
"""Pairs of groups, or halved curves, that public tables count for beside those of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """90 % of errors in log time, where latency bounds a payload and where bandwidth does."""

    latency: float
    bandwidth: float

    def at(self, bandwidth_share: Vector) -> Vector:
        """Half-widths, ``(rows,)``."""
        return self.bandwidth + (self.latency - self.bandwidth) * (1.0 - bandwidth_share)


# Fitted together on eight public sets so that each covers nine rows in ten (pinball loss of the log
# of error over half-width, every protocol as one): leaving any set out moves no figure by more than
# a third, nor any coverage by more than eight points but for Perlmutter's gathers.
_NEAR = Width(latency=0.2, bandwidth=0.08)
"""For each doubling of ranks in a node."""
_FAR, _FAR_RANKS = Width(latency=0.24, bandwidth=0.09), Width(latency=0.42, bandwidth=0.4)
"""For each doubling of nodes, and of ranks on each, which may share cards or not."""
_EXCHANGED = Width(latency=0.3, bandwidth=0.7)
"""For each doubling of nodes of an exchange that sends once per node: beyond four nodes a network
gave each card half (DeepEP on 64 H100)."""
_NEAR_RING, _FAR_RING = Width(latency=0.15, bandwidth=0.37), Width(latency=1.31, bandwidth=0.08)
"""Of another ring: in a node copies of lists may be timed with a gather, across nodes an all-reduce
goes up a tree where a gather goes around."""
_STRANGE = Width(latency=1.05, bandwidth=0.41)
"""Of an all-to-all or a send for a ring, or a ring for those."""
_PAIR_WIDTH = 0.7
"""Two ranks of a node may share a link that the others do not have: a factor of two."""
_BEYOND_LATENCY = 0.8
_BEYOND_OCTAVE = 0.06
"""Beyond the largest payload: where latency bound it, and for each doubling where bandwidth did."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferWidths:
    """Widths of one machine's curves, and of what is carried from them."""

    inside: Mapping[Group, float]
    """Half-width of each measured group, by errors of payloads that were left out of its curve."""
    beyond_factor: float
    """Errors of the larger half of payloads, from the smaller, over ``beyond_width``."""
    carried_factor: float
    """Errors between measured groups over those of public tables."""

    def outside(self, curve: Curve, log_nbytes: Vector) -> Vector:
        """Half-widths that payloads outside a curve add, ``(rows,)``."""
        octaves = curve.octaves_outside(log_nbytes)
        return self.beyond_factor * beyond_width(octaves, curve.top_share())

    def carried(
        self, seen: Group, wanted: Group, bandwidth_share: Vector, *, is_bridged: bool
    ) -> Vector:
        """Half-widths that carrying to another group adds, ``(rows,)``.

        ``is_bridged`` where two GPUs of a node may have a link that the others have not.
        """
        width = self.carried_factor * carried_width(seen, wanted, bandwidth_share)
        is_pair = wanted.num_nodes == 1 and seen.num_ranks == 2 < wanted.num_ranks
        return np.hypot(width, _PAIR_WIDTH * (is_pair and is_bridged))


def carried_width(seen: Group, wanted: Group, bandwidth_share: Vector) -> Vector:
    """Half-widths on public tables of a group from another: of more nodes, of more ranks on each,
    and of another collective, ``(rows,)``.

    >>> from ..workload.collectives import Collective
    >>> two, eight = (Group(collective=Collective.ALL_GATHER, num_ranks=8 * n, num_nodes=n)
    ...               for n in (2, 8))
    >>> carried_width(two, eight, np.array([0.0, 1.0])).round(2).tolist()
    [0.34, 0.13]
    """
    by_node = _EXCHANGED if wanted.num_chosen else _FAR if wanted.num_nodes > 1 else _NEAR
    by_rank = _FAR_RANKS if wanted.num_nodes > 1 else _NEAR
    nodes, ranks = node_and_rank_octaves(seen, wanted)
    if seen.collective is wanted.collective:
        # A group of as many ranks, with another role, is another one all the same.
        nodes = max(nodes, 1.0 - ranks)
    parts = [np.sqrt(nodes) * by_node.at(bandwidth_share)]
    parts.append(np.sqrt(ranks) * by_rank.at(bandwidth_share))
    parts.append(_stand_in_width(seen, wanted, bandwidth_share))
    return np.sqrt(np.sum(np.square(parts), axis=0))


def _stand_in_width(seen: Group, wanted: Group, bandwidth_share: Vector) -> Vector:
    """Half-widths that another collective adds on public tables, ``(rows,)``."""
    if seen.collective is wanted.collective:
        return np.zeros(len(bandwidth_share))
    if {seen.collective, wanted.collective} <= RINGS:
        return (_FAR_RING if wanted.num_nodes > 1 else _NEAR_RING).at(bandwidth_share)
    return _STRANGE.at(bandwidth_share)


def beyond_width(octaves: Vector, bandwidth_share: float) -> Vector:
    """Half-widths that payloads outside a curve add, ``(rows,)``."""
    forgotten = 1.0 - 0.5**octaves
    return _BEYOND_LATENCY * (1.0 - bandwidth_share) * forgotten + _BEYOND_OCTAVE * octaves


def fit_widths(
    curves: Mapping[Group, Curve], carried: Sequence[Vector], *, prior_sigma_log: float
) -> TransferWidths:
    """Widths from errors of left-out payloads, and from those of carrying between groups.

    ``carried`` holds, for each pair of groups of which one can stand in for the other, absolute
    errors in log time over ``carried_width``.
    """
    errors = {group: without_wild(curve.held_out) for group, curve in curves.items()}
    every = np.concatenate([np.empty(0), *errors.values()])
    pooled = drawn_sigma_log(every, prior_sigma_log=prior_sigma_log)
    return TransferWidths(
        inside={
            group: Z_90 * shrunk_sigma_log(found, prior_sigma_log=pooled)
            for group, found in errors.items()
        },
        beyond_factor=_factor(_halved_errors(curves.values())),
        carried_factor=_factor(carried),
    )


def _halved_errors(curves: Iterable[Curve]) -> list[Vector]:
    """Absolute errors of the larger half of each curve's payloads over ``beyond_width``."""
    found = []
    for curve in curves:
        half = curve.lower_half
        if half is not None:
            asked = curve.log_nbytes[len(half.log_nbytes) :]
            error = np.abs(half.log_time(asked) - curve.log_time(asked))
            found.append(error / beyond_width(half.octaves_outside(asked), half.top_share()))
    return found


def _factor(ratios: Sequence[Vector]) -> float:
    """Geometric mean over groups of the 90 % quantile of their ratios, drawn to 1."""
    found = [float(np.quantile(each, 0.9)) for each in ratios if len(each)]
    logs = np.log(np.clip(found, *_FACTORS))
    return float(np.exp(np.sum(logs) / (len(found) + _PRIOR_PAIRS)))
