"""Transfer times of collectives: measured curves, and what they say of groups never measured.

Each collective among so many ranks on so many nodes has a curve over payload.  A group without one
takes the curve of the nearest that has, carried over to its ranks and nodes; where nothing
comparable was measured, NCCL's cost model answers, or for other libraries the prior's latency of a
ring step and bandwidth of the busiest link.

How far a transfer may lie from its estimate is a half-width of a 90 % interval, in log time: inside
a curve from payloads that were left out of it (split conformal); beyond it and for other groups
from what such steps cost on public tables, scaled by what they cost between the measured groups of
this machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..regressors import Z_90, drawn_sigma_log, shrunk_sigma_log, without_wild
from ..workload import Collective, CollectiveCall, GroupRole
from .curves import Curve, Expected, Law, Samples, fit_curve
from .extrapolation import (
    extrapolated_log_time,
    is_comparable,
    is_family,
    link_bytes_per_s,
    same_chunk_nbytes,
)
from .groups import (
    OTHER_OCTAVES,
    PAIRS,
    RINGS,
    Group,
    Measured,
    bus_factor,
    canonical,
    group_of,
    node_and_rank_octaves,
    octaves_between,
    ring_steps,
)
from .nccl_tuner import TunedTime
from .once_per_node import as_all_to_all
from .systems import NetworkPrior
from .topology import Rate, fit_topology

Vector = NDArray[np.float64]
_OPEN_SIGMA_LOG = 1.0
"""Deviation of what nothing comparable was measured of, a factor of 2.7: of a machine's latency and
bandwidth from the device's prior, of one group's from the machine's, and of a time that NCCL's
figures alone tell."""
_MOST_COMPARED = 32
"""Payloads at which a group is held against its stand-in."""
_TELLING_SHARE = 0.5
"""Share of the full bandwidth from which a payload tells of links."""
_MOVED_FRAC = 0.5
"""Share of the other machine's difference from its own prior that is expected here: between
34 pairs of device and fabric in public tables none, half, three quarters and all of it leave 1.2,
1.0, 1.0 and 1.1 of log time in nine groups of ten inside a node, 2.3, 2.0, 1.8 and 1.9 between."""
_NEAR_WIDTH, _FAR_WIDTH = 1.0, 2.0
"""Those 90 % half-widths: inside a node, and between nodes, where networks differ more."""
_FACTORS = (0.25, 8.0)
"""How far this machine's own errors may narrow or widen what public tables say: pairs that agree
say little of the next, since sizes that were measured are often those that a fabric was built for;
the worst one is not all."""
_PRIOR_PAIRS = 4.0
"""Pairs of groups, or halved curves, that public tables count for beside those of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupModel:
    """One group, as far as it was measured."""

    curve: Curve
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """Estimates for one group, ``(rows,)`` each."""

    log_time: Vector
    half_width_log: Vector
    """Half of the 90 % interval of log time."""
    octaves: Vector
    """Doublings of payload and ranks between the estimate and what was measured; infinite where
    nothing comparable was."""

    @property
    def sigma_log(self) -> Vector:
        """Standard deviation of log time of a normal error with this interval."""
        return self.half_width_log / Z_90


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveModel:
    """All groups of a machine."""

    prior: NetworkPrior
    carrying: NetworkPrior
    """The prior with the nodes and links that the groups tell, for carrying between them."""
    groups: Mapping[Group, GroupModel]
    widths: TransferWidths
    like: CollectiveModel | None = None
    """Another machine's, for groups that nothing here says anything of."""

    def estimate(self, group: Group, nbytes: Vector) -> Transfers:
        """Transfers of these payloads among the ranks of a group."""
        logs = np.log(np.maximum(nbytes, 1.0))
        group = joined(group, self.prior)
        if group in self.groups:
            return self._measured(group, logs)
        if group.num_chosen and not any(seen.num_chosen for seen in self.groups):
            plain, share = as_all_to_all(group)
            return self.estimate(plain, share * nbytes)
        nearest = _nearest(group, self.groups)
        if nearest is None and (found := self._moved(group, nbytes)) is not None:
            return found
        if nearest is None:
            width = np.full(len(logs), Z_90 * _OPEN_SIGMA_LOG)
            times = np.log(_by_prior(group, self.carrying)(np.exp(logs)))
            far = np.full(len(logs), np.inf)
            return Transfers(log_time=times, half_width_log=width, octaves=far)
        return self._carried(nearest, group, logs)

    def has(self, group: Group) -> bool:
        """Whether a group was measured itself, in whatever role."""
        wanted = joined(group, self.prior)
        return wanted in self.groups or replace(wanted, role=GroupRole.OTHER) in self.groups

    def _moved(self, group: Group, nbytes: Vector) -> Transfers | None:
        """From the other machine; None where it knows nothing either, or has another library."""
        other = self.like
        if other is None or (self.prior.links is None) != (other.prior.links is None):
            return None
        there = other.estimate(group, nbytes)
        if not np.isfinite(there.octaves).all():
            return None
        bytes_ = np.maximum(nbytes, 1.0)
        here, elsewhere = (
            np.log(_by_prior(group, prior)(bytes_)) for prior in (self.prior, other.prior)
        )
        width = _FAR_WIDTH if group.num_nodes > 1 else _NEAR_WIDTH
        return Transfers(
            log_time=here + _MOVED_FRAC * (there.log_time - elsewhere),
            half_width_log=np.hypot(_MOVED_FRAC * there.half_width_log, width),
            octaves=there.octaves + OTHER_OCTAVES,
        )

    def _measured(self, group: Group, logs: Vector) -> Transfers:
        curve = self.groups[group].curve
        octaves = curve.octaves_outside(logs)
        width = np.full(len(logs), self.widths.inside[group])
        if octaves.any():
            width = np.hypot(width, self.widths.outside(curve, logs))
        return Transfers(log_time=curve.log_time(logs), half_width_log=width, octaves=octaves)

    def _carried(self, seen: Group, group: Group, logs: Vector) -> Transfers:
        nbytes = np.exp(logs)
        source = np.log(
            np.maximum(same_chunk_nbytes(seen, group, nbytes, self.carrying.links), 1.0)
        )
        inside = self._measured(seen, source)
        between = octaves_between(seen, group)
        curve = self.groups[seen].curve
        log_time = extrapolated_log_time(curve, seen, group, nbytes, self.carrying)
        share = _share(group, nbytes, log_time, curve, self.carrying)
        links = self.carrying.links
        carried = self.widths.carried(
            *(seen, group, share), is_bridged=links is None or links.may_be_bridged
        )
        return Transfers(
            log_time=log_time,
            half_width_log=np.hypot(inside.half_width_log, carried),
            octaves=inside.octaves + between,
        )


def expected_time(group: Group, prior: NetworkPrior) -> Expected | None:
    """NCCL's own estimate of a group as a function of payload; None on other libraries."""
    return None if prior.links is None else TunedTime(group=group, links=prior.links)


def fit_collectives(
    measured: Mapping[CollectiveCall, Measured],
    prior: NetworkPrior,
    *,
    prior_sigma_log: float = 0.1,
) -> CollectiveModel:
    """The model of a run from its transfers."""
    rows: defaultdict[Group, list[tuple[int, Measured]]] = defaultdict(list)
    for call, found in measured.items():
        if call.num_ranks > 1:
            group = group_of(canonical(call))
            rows[group].append((call.nbytes, found))
    samples = {group: _samples(found) for group, found in rows.items()}
    numbers = {group: sum(m.num_rows for _, m in found) for group, found in rows.items()}
    return fit_transfers(samples, prior, prior_sigma_log=prior_sigma_log, num_rows=numbers)


def joined(group: Group, prior: NetworkPrior) -> Group:
    """The group with hosts that one NVLink domain joins counted as one node."""
    if prior.links is None or group.num_nodes == 1:
        return group
    islands = prior.links.topology.num_islands(group.num_ranks, group.num_nodes)
    chosen = group.num_chosen if islands > 1 else 0
    return replace(group, num_nodes=islands, num_chosen=chosen)


def fit_transfers(
    samples: Mapping[Group, Samples],
    prior: NetworkPrior,
    *,
    prior_sigma_log: float = 0.1,
    num_rows: Mapping[Group, int] | None = None,
) -> CollectiveModel:
    """The curve of each group, the nodes and links that they tell, and the widths."""
    # Of groups that NVLink makes one the widest spread over hosts is kept.
    ordered = {joined(g, prior): samples[g] for g in sorted(samples, key=lambda g: g.order)}
    groups = {}
    for group, found in ordered.items():
        curve = fit_curve(
            found,
            _ring_law(group, prior),
            sigma_log=_OPEN_SIGMA_LOG,
            expected=expected_time(group, prior),
        )
        rows = (num_rows or {}).get(group, len(found))
        groups[group] = GroupModel(curve=curve, num_rows=rows)
    carrying = fitted_nodes({group: model.curve for group, model in groups.items()}, prior)
    widths = fit_widths(
        {group: model.curve for group, model in groups.items()},
        _carried_errors(groups, carrying),
        prior_sigma_log=prior_sigma_log,
    )
    return CollectiveModel(prior=prior, carrying=carrying, groups=groups, widths=widths)


def _samples(rows: Sequence[tuple[int, Measured]]) -> Samples:
    """Payloads and times of a group; bounds only where it has no exact transfer."""
    exact = [row for row in rows if not row[1].is_bound]
    kept = exact or rows
    return Samples(
        nbytes=np.array([n for n, _ in kept], dtype=np.float64),
        time_s=np.array([m.time_s for _, m in kept]),
        weight=np.sqrt([m.weight for _, m in kept]),
    )


def _nearest(group: Group, groups: Mapping[Group, GroupModel]) -> Group | None:
    """The measured group that stands in for another, on links of its kind.

    The nearest in collective, nodes and ranks on each together; of equals the same collective
    first, then the same role, then the same number of ranks a node.
    """
    found = [g for g in groups if g != group and is_comparable(g, group)]
    return min(
        found,
        key=lambda g: (
            octaves_between(g, group),
            g.collective is not group.collective,
            g.role is not group.role,
            _apart(g.ranks_per_node, group.ranks_per_node),
            g.order,
        ),
        default=None,
    )


def _apart(one: float, other: float) -> float:
    """Doublings between two sizes; half and twice are exactly as far."""
    return round(abs(float(np.log2(one / other))), 9)


def _share(
    group: Group, nbytes: Vector, log_time: Vector, seen: Curve, prior: NetworkPrior
) -> Vector:
    """Share of a time that bytes take, ``(rows,)``: at the links' full rate, or of an exchange what
    is beyond its latency."""
    if group.num_chosen:
        return 1.0 - np.minimum(seen.least_time_s / np.exp(log_time), 1.0)
    rate = prior.bus_bytes_per_s
    if prior.links is not None:
        rate = link_bytes_per_s(group, prior.links)
    bytes_s = bus_factor(group.collective, group.num_ranks) * nbytes / rate
    return np.clip(bytes_s / np.exp(log_time), 0.0, 1.0)


def _carried_errors(groups: Mapping[Group, GroupModel], prior: NetworkPrior) -> list[Vector]:
    """Each group held against what can stand in for it, the nearest of its own collective, of other
    rings and of all others: absolute errors over the widths of public tables."""
    errors = []
    for group, model in groups.items():
        for alike in (_is_same, _is_other_ring, _is_strange):
            others = {g: m for g, m in groups.items() if g != group and alike(g, group)}
            seen = _nearest(group, others)
            if seen is None or bool(seen.num_chosen) is not bool(group.num_chosen):
                continue
            logs = model.curve.log_nbytes
            logs = logs[:: max(1, len(logs) // _MOST_COMPARED)]
            nbytes = np.exp(logs)
            curve, log_time = groups[seen].curve, model.curve.log_time(logs)
            error = extrapolated_log_time(curve, seen, group, nbytes, prior) - log_time
            share = _share(group, nbytes, log_time, curve, prior)
            errors.append(np.abs(error) / carried_width(seen, group, share))
    return errors


def _is_same(seen: Group, wanted: Group) -> bool:
    return seen.collective is wanted.collective


def _is_other_ring(seen: Group, wanted: Group) -> bool:
    return not _is_same(seen, wanted) and is_family(seen, wanted)


def _is_strange(seen: Group, wanted: Group) -> bool:
    return not is_family(seen, wanted)


def fitted_nodes(curves: Mapping[Group, Curve], prior: NetworkPrior) -> NetworkPrior:
    """The prior with topology and rates that the largest payloads tell."""
    if prior.links is None:
        return prior
    found = (_rate(group, curve) for group, curve in curves.items())
    fitted = fit_topology(
        [rate for rate in found if rate is not None],
        prior.links.topology,
        node_bytes_per_s=prior.links.node_bytes_per_s,
        card_bytes_per_s=prior.links.network_bytes_per_s,
        joints=prior.links.other_joints,
    )
    links = replace(
        prior.links,
        topology=fitted.topology,
        node_bytes_per_s=fitted.node_bytes_per_s,
        network_bytes_per_s=fitted.card_bytes_per_s,
    )
    return replace(prior, links=links)


def _rate(group: Group, curve: Curve) -> Rate | None:
    """The rate of the largest payload over the links of a rank or out of a node; None of a send,
    which one channel may bound, and of what is passed on inside nodes as well."""
    nbytes = float(np.exp(curve.log_nbytes[-1]))
    if group.num_chosen or group.collective in PAIRS or curve.top_share() < _TELLING_SHARE:
        return None
    factor = bus_factor(group.collective, group.num_ranks)
    is_far = group.num_nodes > 1
    if is_far and group.collective is Collective.ALL_TO_ALL:
        factor = (1.0 - 1.0 / group.num_nodes) * group.ranks_per_node
    time_s = float(np.exp(curve.log_time(curve.log_nbytes[-1:]))[0])
    return Rate(
        ranks_per_node=group.ranks_per_node,
        bytes_per_s=factor * nbytes / time_s,
        is_far=is_far,
        num_steps=ring_steps(group.collective, group.num_ranks),
    )


def _by_prior(group: Group, prior: NetworkPrior) -> Expected:
    """The time of a group that is expected before any transfer of its machine was measured."""
    return expected_time(group, prior) or _ring_law(group, prior)


def _ring_law(group: Group, prior: NetworkPrior) -> Law:
    """Time over payload of a ring with the prior's constants.

    >>> from .systems import network_prior
    >>> two = Group(collective=Collective.ALL_REDUCE, num_ranks=2)
    >>> _ring_law(two, network_prior("cpu"))(np.array([1.5e6])).round(6).tolist()
    [0.002]
    """
    return Law(
        fixed_s=ring_steps(group.collective, group.num_ranks) * prior.step_s,
        byte_s=bus_factor(group.collective, group.num_ranks) / prior.bus_bytes_per_s,
    )


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
