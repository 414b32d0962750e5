"""Transfer times of collectives: measured curves, and their extrapolation to other groups.

Each collective on a number of ranks and nodes has a curve over payload. A group without one uses
the curve of the nearest measured group, extrapolated to its ranks and nodes; if nothing comparable
was measured, it uses NCCL's cost model, or for other libraries the prior's latency of a ring step
and bandwidth of the busiest link.

The error of an estimate is the half-width of a 90 % interval, in log time: inside a curve from
held-out payloads (split conformal); beyond it and for other groups from the errors of such
extrapolations on public tables, scaled by those between the measured groups of this machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..regressors.robust import Z_90, clip_residuals, drawn_sigma_log, shrunk_sigma_log
from ..workload.collectives import Collective, CollectiveCall, GroupRole
from ._extrapolation import (
    against_ring_frac,
    extrapolated_log_time,
    is_comparable,
    is_family,
    link_bytes_per_s,
    same_chunk_nbytes,
)
from ._topology import Rate, fit_topology
from .curves import Curve, Expected, Law, Samples, fit_curve, fit_law
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
from .nccl_tuner import LinkClass, TunedTime
from .once_per_node import as_all_to_all, unmeasured_exchange_s
from .systems import LATENCY_SIGMA_LOG, NetworkPrior

Vector = NDArray[np.float64]
_OPEN_SIGMA_LOG = 1.0
"""Deviation without any comparable measurement, a factor of 2.7: of a machine's latency and
bandwidth from the device's prior, of one group's from the machine's, and of a time from NCCL's
figures alone."""
_MOST_COMPARED = 32
"""Payloads at which a group is compared with its stand-in."""
_SHORT_NBYTES = 2**14
"""Payload up to which a transfer in a node is latency alone: NCCL's LL sends 8 KiB per channel at
once."""
_TELLING_SHARE = 0.5
"""Share of the full bandwidth from which a payload is used to fit link rates."""
_MOVED_FRAC = 0.5
"""Share of the other machine's difference from its own prior that is transferred: between 34 pairs
of device and fabric in public tables none, half, three quarters and all of it leave 1.2, 1.0, 1.0
and 1.1 of log time in nine groups of ten inside a node, 2.3, 2.0, 1.8 and 1.9 between nodes."""
_NEAR_WIDTH, _FAR_WIDTH = 1.0, 2.0
"""90 % half-widths of that transfer: inside a node, and between nodes, where networks differ
more."""
_FACTORS = (0.25, 8.0)
"""Bounds of the factor by which this machine's own errors narrow or widen those of public tables:
measured sizes are often those that a fabric was built for, so that their agreement says little of
others, and the worst pair is not typical."""
_PRIOR_PAIRS = 4.0
"""Pairs of groups, or halved curves, that the public tables' widths are worth."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupModel:
    """The measured curve of one group."""

    curve: Curve
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """Estimates for one group, ``(rows,)`` each."""

    log_time: Vector
    half_width_log: Vector
    """Half of the 90 % interval of log time."""
    octaves: Vector
    """Doublings of payload and ranks between the estimate and the measurements; infinite if nothing
    comparable was measured."""

    @property
    def sigma_log(self) -> Vector:
        """Standard deviation of log time of a normal error with this interval."""
        return self.half_width_log / Z_90


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveModel:
    """Transfer models of all groups of a machine."""

    prior: NetworkPrior
    fitted_prior: NetworkPrior
    """The prior with the nodes and links fitted to the groups, for extrapolation between them."""
    groups: Mapping[Group, GroupModel]
    widths: TransferWidths
    like: CollectiveModel | None = None
    """Another machine's model, for groups without a comparable one here."""

    def estimate(self, group: Group, nbytes: Vector) -> Transfers:
        """Estimate transfers of these payloads among the ranks of a group."""
        logs = np.log(np.maximum(nbytes, 1.0))
        group = group_over_domains(group, self.prior)
        if group in self.groups:
            return self._measured(group, logs)
        if group.num_chosen and not any(seen.num_chosen for seen in self.groups):
            plain, share = as_all_to_all(group)
            transfers = self.estimate(plain, share * nbytes)
            time_s = unmeasured_exchange_s(group, np.exp(transfers.log_time))
            return replace(transfers, log_time=np.log(time_s))
        nearest = _nearest(group, self.groups)
        if nearest is None and (transfers := self._moved(group, nbytes)) is not None:
            return transfers
        if nearest is None:
            width = np.full(len(logs), Z_90 * _OPEN_SIGMA_LOG)
            times = np.log(_by_prior(group, self.fitted_prior)(np.exp(logs)))
            far = np.full(len(logs), np.inf)
            return Transfers(log_time=times, half_width_log=width, octaves=far)
        return self._carried(nearest, group, logs)

    def has(self, group: Group) -> bool:
        """Return True if a group was measured itself, in any role."""
        wanted = group_over_domains(group, self.prior)
        return wanted in self.groups or replace(wanted, role=GroupRole.OTHER) in self.groups

    def _moved(self, group: Group, nbytes: Vector) -> Transfers | None:
        """Estimate from the other machine; None if it has nothing comparable, or another
        library."""
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
            np.maximum(same_chunk_nbytes(seen, group, nbytes, self.fitted_prior.links), 1.0)
        )
        inside = self._measured(seen, source)
        between = octaves_between(seen, group)
        curve = self.groups[seen].curve
        log_time = extrapolated_log_time(curve, seen, group, nbytes, self.fitted_prior)
        share = _share(group, nbytes, log_time, curve, self.fitted_prior)
        links = self.fitted_prior.links
        carried = self.widths.carried(
            *(seen, group, share), is_bridged=links is None or links.may_be_bridged
        )
        return Transfers(
            log_time=log_time,
            half_width_log=np.hypot(inside.half_width_log, carried),
            octaves=inside.octaves + between,
        )


def expected_time(group: Group, prior: NetworkPrior) -> Expected | None:
    """Return NCCL's own estimate of a group as a function of payload; None for other libraries."""
    return None if prior.links is None else TunedTime(group=group, links=prior.links)


def fit_collectives(
    measured: Mapping[CollectiveCall, Measured],
    prior: NetworkPrior,
    *,
    prior_sigma_log: float = 0.1,
) -> CollectiveModel:
    """Fit the transfer model of a run from its measured transfers."""
    rows: defaultdict[Group, list[tuple[int, Measured]]] = defaultdict(list)
    for call, measurement in measured.items():
        if call.num_ranks > 1:
            group = group_of(canonical(call))
            rows[group].append((call.nbytes, measurement))
    samples = {group: _samples(measurement) for group, measurement in rows.items()}
    numbers = {
        group: sum(m.num_rows for _, m in measurement) for group, measurement in rows.items()
    }
    return fit_transfers(samples, prior, prior_sigma_log=prior_sigma_log, num_rows=numbers)


def group_over_domains(group: Group, prior: NetworkPrior) -> Group:
    """Return the group with hosts joined by one NVLink domain counted as one node."""
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
    """Fit the curve of each group, the nodes and links, and the interval widths."""
    # If an NVLink domain makes groups equal, keep the one spread over most hosts.
    ordered = {
        group_over_domains(g, prior): samples[g] for g in sorted(samples, key=lambda g: g.order)
    }
    groups = {}
    for group, group_samples in ordered.items():
        curve = fit_curve(
            group_samples,
            _ring_law(group, prior),
            sigma_log=_OPEN_SIGMA_LOG,
            expected=expected_time(group, prior),
        )
        rows = (num_rows or {}).get(group, len(group_samples))
        groups[group] = GroupModel(curve=curve, num_rows=rows)
    carrying = fitted_nodes({group: model.curve for group, model in groups.items()}, prior)
    widths = fit_widths(
        {group: model.curve for group, model in groups.items()},
        _carried_errors(groups, carrying),
        prior_sigma_log=prior_sigma_log,
    )
    return CollectiveModel(prior=prior, fitted_prior=carrying, groups=groups, widths=widths)


def _samples(rows: Sequence[tuple[int, Measured]]) -> Samples:
    """Return the payloads and times of a group; upper bounds are used only if it has no exact
    transfer."""
    exact = [row for row in rows if not row[1].is_bound]
    chosen = exact or rows
    return Samples(
        nbytes=np.array([n for n, _ in chosen], dtype=np.float64),
        time_s=np.array([m.time_s for _, m in chosen]),
        weight=np.sqrt([m.weight for _, m in chosen]),
    )


def _nearest(group: Group, groups: Mapping[Group, GroupModel]) -> Group | None:
    """Return the measured group that stands in for another, on links of its kind.

    It is the nearest in collective, nodes and ranks per node together; ties are broken by the same
    collective, then the same role, then the nearest number of ranks per node.
    """
    candidates = [g for g in groups if g != group and is_comparable(g, group)]
    return min(
        candidates,
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
    """Return the doublings between two sizes, rounded so that half and twice are exactly
    equidistant."""
    return round(abs(float(np.log2(one / other))), 9)


def _share(
    group: Group, nbytes: Vector, log_time: Vector, seen: Curve, prior: NetworkPrior
) -> Vector:
    """Return the share of a time due to bytes, ``(rows,)``: at the links' full rate, or for an
    exchange all but its latency."""
    if group.num_chosen:
        return 1.0 - np.minimum(seen.least_time_s / np.exp(log_time), 1.0)
    rate = prior.bus_bytes_per_s
    if prior.links is not None:
        rate = link_bytes_per_s(group, prior.links)
    bytes_s = bus_factor(group.collective, group.num_ranks) * nbytes / rate
    return np.clip(bytes_s / np.exp(log_time), 0.0, 1.0)


def _carried_errors(groups: Mapping[Group, GroupModel], prior: NetworkPrior) -> list[Vector]:
    """Return absolute errors over the widths of public tables, comparing each group with its
    nearest stand-ins: of its own collective, of other rings and of all others."""
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
            errors.append(np.abs(error) / extrapolation_width(seen, group, share))
    return errors


def _is_same(seen: Group, wanted: Group) -> bool:
    return seen.collective is wanted.collective


def _is_other_ring(seen: Group, wanted: Group) -> bool:
    return not _is_same(seen, wanted) and is_family(seen, wanted)


def _is_strange(seen: Group, wanted: Group) -> bool:
    return not is_family(seen, wanted)


def fitted_nodes(curves: Mapping[Group, Curve], prior: NetworkPrior) -> NetworkPrior:
    """Return the prior with the topology and rates fitted to the largest payloads, and the latency
    of a step in a node to the shortest."""
    if prior.links is None:
        return prior
    rates = (_rate(group, curve, prior.links) for group, curve in curves.items())
    fitted = fit_topology(
        [rate for rate in rates if rate is not None],
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
    return _with_steps(curves, replace(prior, links=links))


def _with_steps(curves: Mapping[Group, Curve], prior: NetworkPrior) -> NetworkPrior:
    """Return the prior with a launch and a step in a node as rings of several lengths have them:
    their shortest times are a line over their steps."""
    times_s = {
        group: curve.least_time_s
        for group, curve in curves.items()
        if group.num_nodes == 1
        and group.collective in RINGS
        and curve.log_nbytes[0] <= np.log(_SHORT_NBYTES)
    }
    if not times_s or not prior.base_s:
        return prior
    steps = [ring_steps(group.collective, group.num_ranks) for group in times_s]
    law = fit_law(
        np.ones(len(steps)),
        np.array(steps, dtype=np.float64),
        np.log([*times_s.values()]),
        np.ones(len(steps)),
        Law(fixed_s=prior.base_s, byte_s=prior.step_s),
        sigma_log=LATENCY_SIGMA_LOG,
    )
    return replace(prior, base_s=law.fixed_s, step_s=law.byte_s)


def _rate(group: Group, curve: Curve, links: LinkClass) -> Rate | None:
    """Return the rate of the largest payload over the links of a rank or out of a node, as of a
    ring; None for sends, which one channel may bound, and for exchanges that are forwarded inside
    nodes."""
    nbytes = float(np.exp(curve.log_nbytes[-1]))
    if group.num_chosen or group.collective in PAIRS or curve.top_share() < _TELLING_SHARE:
        return None
    factor = bus_factor(group.collective, group.num_ranks)
    is_far = group.num_nodes > 1
    if is_far and group.collective is Collective.ALL_TO_ALL:
        factor = (1.0 - 1.0 / group.num_nodes) * group.ranks_per_node
    elif is_far:
        factor *= against_ring_frac(group, links) / links.pair_frac(group)
    time_s = float(np.exp(curve.log_time(curve.log_nbytes[-1:]))[0])
    return Rate(
        ranks_per_node=group.ranks_per_node,
        bytes_per_s=factor * nbytes / time_s,
        is_far=is_far,
        num_steps=ring_steps(group.collective, group.num_ranks),
    )


def _by_prior(group: Group, prior: NetworkPrior) -> Expected:
    """Return the prior's time of a group, before any transfer of its machine was measured."""
    return expected_time(group, prior) or _ring_law(group, prior)


def _ring_law(group: Group, prior: NetworkPrior) -> Law:
    """Return the time over payload of a ring with the prior's constants.

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
    """90 % half-widths in log time, for latency-bound and for bandwidth-bound payloads."""

    latency: float
    bandwidth: float

    def at(self, bandwidth_share: Vector) -> Vector:
        """Return half-widths, ``(rows,)``."""
        return self.bandwidth + (self.latency - self.bandwidth) * (1.0 - bandwidth_share)


# Fitted together on eight public sets so that each covers nine rows in ten (pinball loss of the log
# of error over half-width, every protocol with equal weight): leaving any set out changes no figure
# by more than a third, nor any coverage by more than eight points except for Perlmutter's gathers.
_NEAR = Width(latency=0.2, bandwidth=0.08)
"""Width per doubling of ranks in a node."""
_FAR, _FAR_RANKS = Width(latency=0.24, bandwidth=0.09), Width(latency=0.42, bandwidth=0.4)
"""Widths per doubling of nodes, and of ranks per node, which may or may not share cards."""
_EXCHANGED = Width(latency=0.3, bandwidth=0.7)
"""Width per doubling of nodes for an exchange that sends once per node: beyond four nodes a network
gave each card half (DeepEP on 64 H100)."""
_NEAR_RING, _FAR_RING = Width(latency=0.15, bandwidth=0.37), Width(latency=1.31, bandwidth=0.08)
"""Widths for a stand-in with another ring: in a node, copies of lists may be timed with a gather;
across nodes, an all-reduce uses a tree where a gather uses a ring."""
_STRANGE = Width(latency=1.05, bandwidth=0.41)
"""Width for an all-to-all or a send that stands in for a ring, or the reverse."""
_PAIR_WIDTH = 0.7
"""Additional width if two ranks of a node may share a link that the others do not have: a factor of
two."""
_BEYOND_LATENCY = 0.8
_BEYOND_OCTAVE = 0.06
"""Widths beyond the largest payload: for a latency-bound one, and per doubling for a
bandwidth-bound one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferWidths:
    """Interval widths of one machine's curves and of extrapolations from them."""

    inside: Mapping[Group, float]
    """Half-width of each measured group, from held-out payloads of its curve."""
    beyond_factor: float
    """Factor on ``beyond_width``: errors of the larger half of payloads, extrapolated from the
    smaller."""
    carried_factor: float
    """Factor on the widths of public tables, from errors between this machine's groups."""

    def outside(self, curve: Curve, log_nbytes: Vector) -> Vector:
        """Return the half-widths that payloads outside a curve add, ``(rows,)``."""
        octaves = curve.octaves_outside(log_nbytes)
        return self.beyond_factor * beyond_width(octaves, curve.top_share())

    def carried(
        self, seen: Group, wanted: Group, bandwidth_share: Vector, *, is_bridged: bool
    ) -> Vector:
        """Return the half-widths that extrapolation to another group adds, ``(rows,)``.

        ``is_bridged`` is True if two GPUs of a node may have a link that the others lack.
        """
        width = self.carried_factor * extrapolation_width(seen, wanted, bandwidth_share)
        is_pair = wanted.num_nodes == 1 and seen.num_ranks == 2 < wanted.num_ranks
        return np.hypot(width, _PAIR_WIDTH * (is_pair and is_bridged))


def extrapolation_width(seen: Group, wanted: Group, bandwidth_share: Vector) -> Vector:
    """Return half-widths on public tables of extrapolation to other nodes, ranks per node and
    collectives, ``(rows,)``.

    >>> from ..workload.collectives import Collective
    >>> two, eight = (Group(collective=Collective.ALL_GATHER, num_ranks=8 * n, num_nodes=n)
    ...               for n in (2, 8))
    >>> extrapolation_width(two, eight, np.array([0.0, 1.0])).round(2).tolist()
    [0.34, 0.13]
    """
    by_node = _EXCHANGED if wanted.num_chosen else _FAR if wanted.num_nodes > 1 else _NEAR
    by_rank = _FAR_RANKS if wanted.num_nodes > 1 else _NEAR
    nodes, ranks = node_and_rank_octaves(seen, wanted)
    if seen.collective is wanted.collective:
        # A group of the same size with another role is still a different group.
        nodes = max(nodes, 1.0 - ranks)
    parts = [np.sqrt(nodes) * by_node.at(bandwidth_share)]
    parts.append(np.sqrt(ranks) * by_rank.at(bandwidth_share))
    parts.append(_stand_in_width(seen, wanted, bandwidth_share))
    return np.sqrt(np.sum(np.square(parts), axis=0))


def _stand_in_width(seen: Group, wanted: Group, bandwidth_share: Vector) -> Vector:
    """Return the half-widths that another collective adds on public tables, ``(rows,)``."""
    if seen.collective is wanted.collective:
        return np.zeros(len(bandwidth_share))
    if {seen.collective, wanted.collective} <= RINGS:
        return (_FAR_RING if wanted.num_nodes > 1 else _NEAR_RING).at(bandwidth_share)
    return _STRANGE.at(bandwidth_share)


def beyond_width(octaves: Vector, bandwidth_share: float) -> Vector:
    """Return the half-widths on public tables that payloads outside a curve add, ``(rows,)``."""
    forgotten = 1.0 - 0.5**octaves
    return _BEYOND_LATENCY * (1.0 - bandwidth_share) * forgotten + _BEYOND_OCTAVE * octaves


def fit_widths(
    curves: Mapping[Group, Curve], carried: Sequence[Vector], *, prior_sigma_log: float
) -> TransferWidths:
    """Fit widths to errors of held-out payloads, and to those of extrapolation between groups.

    ``carried`` has, for each pair of a group and its stand-in, absolute errors in log time over
    ``extrapolation_width``.
    """
    errors = {group: clip_residuals(curve.held_out_errors) for group, curve in curves.items()}
    every = np.concatenate([np.empty(0), *errors.values()])
    pooled = drawn_sigma_log(every, prior_sigma_log=prior_sigma_log)
    return TransferWidths(
        inside={
            group: Z_90 * shrunk_sigma_log(group_errors, prior_sigma_log=pooled)
            for group, group_errors in errors.items()
        },
        beyond_factor=_factor(_halved_errors(curves.values())),
        carried_factor=_factor(carried),
    )


def _halved_errors(curves: Iterable[Curve]) -> list[Vector]:
    """Return absolute errors of the larger half of each curve's payloads over ``beyond_width``."""
    ratios = []
    for curve in curves:
        half = curve.lower_half
        if half is not None:
            upper_log_nbytes = curve.log_nbytes[len(half.log_nbytes) :]
            error = np.abs(half.log_time(upper_log_nbytes) - curve.log_time(upper_log_nbytes))
            ratios.append(
                error / beyond_width(half.octaves_outside(upper_log_nbytes), half.top_share())
            )
    return ratios


def _factor(ratios: Sequence[Vector]) -> float:
    """Return the geometric mean over groups of the 90 % quantile of their ratios, shrunk to 1."""
    quantiles = [float(np.quantile(each, 0.9)) for each in ratios if len(each)]
    logs = np.log(np.clip(quantiles, *_FACTORS))
    return float(np.exp(np.sum(logs) / (len(quantiles) + _PRIOR_PAIRS)))
