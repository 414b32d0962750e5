"""Rates from public measurements: the cost of an operator before this run measures it.

``priors.json`` has, for each device, operator and table of a public source, the rates that
``benchmarks/fits/build_priors.py`` fitted. This module decides how those sources are joined, how
far a new one may lie from them, and what a device without measurements takes from others, so that
any source can be left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..records.files import read_package_json
from ..regressors.robust import PRIOR_WEIGHT, Z_90
from ..workload.operators import OperatorKind, Phase
from ._rates import Rates
from .batches import ShapeBatch
from .laws import Ceilings, OperatorFamily, columns, family
from .operator_kinds import WorkKind
from .priors import YEARS_A_STEP, DevicePrior, Generation, device_prior

FILE = "priors.json"
_LAUNCH_S = 1e-6
"""Launches have no data sheet: their factor is relative to a microsecond."""
RATE_SIGMA_LOG = {WorkKind.LAUNCH: 1.0, WorkKind.FLOP: 0.3, WorkKind.BYTES: 0.5}
"""Deviation between two sources if few pairs determine it, and of an operator's rates from those of
all samples of a machine."""
BARE_LOG = {WorkKind.LAUNCH: 0.4, WorkKind.FLOP: 0.3, WorkKind.BYTES: 0.3}
"""Factors before any measurement: 1.5 us a launch, 75 % of the data sheet."""
_WELL_KNOWN = 0.1
"""Deviation of a factor below which a source has full weight when sources are compared."""

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRates:
    """Rates of one operator on one device by one table."""

    device: str
    pool: str
    """``<operator>/<phase>``; all linears are ``linear``."""
    element_nbytes: int
    table: str
    costs: tuple[WorkKind, ...]
    log_factor: tuple[float, ...]
    """Log of the seconds per unit of each column over those of the data sheet."""
    sigma_log: tuple[float, ...]
    """Deviation of each factor within the table."""
    log_power: float
    lead_frac: float
    shape_sigma_log: float
    """Deviation of held-out residuals of log time over groups of shapes."""
    median_residual: float
    """Median residual of all rows in log time, after a robust fit."""
    num_rows: int

    @property
    def generation(self) -> Generation:
        """Generation of the device."""
        return generation(self.device)

    @property
    def flop_log_factor(self) -> float:
        """Log of the seconds of a FLOP over those of the data sheet."""
        return self.log_factor[self.costs.index(WorkKind.FLOP)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePrior:
    """Cost of an operator on a device by public measurements.

    ``replace(prior, ceilings=...)`` applies it to other ceilings.
    """

    sources: tuple[str, ...]
    """Device and table of each."""
    steps: float
    """Generations between the device and those that were measured; 0 if it was measured itself."""
    ceilings: Ceilings
    """Rates of the data sheet that the factors are relative to."""
    num_units: int | None
    costs: tuple[WorkKind, ...]
    log_factor: tuple[float, ...]
    sigma_log: tuple[float, ...]
    """Deviation of each column's factor from that of another source."""
    log_power: float
    lead_frac: float
    shape_sigma_log: float
    """Remaining error of a shape if the factors are known."""

    @property
    def rates(self) -> Rates:
        """Constants of the law: with ``sigma_log`` the start of a fit."""
        units = np.log([self.ceilings.unit_s(cost) for cost in self.costs])
        return Rates(
            log_unit_s=units + np.array(self.log_factor),
            log_power=self.log_power,
            lead_frac=self.lead_frac,
        )

    @property
    def flop_log_factor(self) -> float:
        """Log of the seconds of a FLOP over those of the data sheet."""
        return self.log_factor[self.costs.index(WorkKind.FLOP)]

    @property
    def flop_sigma_log(self) -> float:
        """Deviation of that from another source."""
        return self.sigma_log[self.costs.index(WorkKind.FLOP)]

    def log_time(self, batch: ShapeBatch) -> Vector:
        """Return log seconds, ``(rows,)``."""
        return self.rates.log_time(columns(batch, self.num_units))

    def sigma_log_time(self, batch: ShapeBatch) -> Vector:
        """Return the standard deviation of log time, ``(rows,)``: factors by each column's share of
        the time, and shapes."""
        shares = self.rates.shares(columns(batch, self.num_units))
        factors = ((shares * np.array(self.sigma_log)) ** 2).sum(axis=1)
        return np.sqrt(factors + self.shape_sigma_log**2)


def rates_prior(
    device: str,
    kind: OperatorKind,
    phase: Phase,
    element_nbytes: int,
    *,
    without: tuple[str, ...] = (),
) -> RatePrior | None:
    """Return the prior of an operator on a device by its driver's name; None if it has no
    measurements.

    Sources of the device's generation are joined by the precision of their factors; for operators
    that only move memory, the law with its counted passes is an additional source. A generation
    without sources takes the factors of the nearest measured one in years, with a deviation that is
    the difference of generations within one table and grows with distance. Products whose element
    size was only measured on another generation are joined with those of other elements on the
    device's generation, so that neither the elements nor the generation alone decide the share of
    the data sheet. ``without`` leaves out tables by name, both for the factors and for the
    deviation between sources.
    """
    phase = Phase.FORWARD if phase is Phase.RECOMPUTE else phase
    name, excluded_tables = device_prior(device).name, tuple(sorted(without))
    prior = _of_pass(name, kind, phase, element_nbytes, excluded_tables)
    if phase is not Phase.BACKWARD or family(kind) not in _BACKWARD_LOG:
        return prior
    forward = _of_pass(name, kind, Phase.FORWARD, element_nbytes, excluded_tables)
    return _backward_of(forward, prior, _BACKWARD_LOG[family(kind)])


def measured_devices(device: str, element_nbytes: int) -> tuple[str, ...]:
    """Return the devices, by the names of their priors, whose measured products give a device's;
    its own only if those were of such elements.

    >>> measured_devices("NVIDIA H200", 2), measured_devices("Tesla T4", 2)
    (('h100',), ('a100', 'a100-40'))
    """
    prior = rates_prior(device, OperatorKind.LINEAR, Phase.FORWARD, element_nbytes)
    names = () if prior is None else dict.fromkeys(s.split()[0] for s in prior.sources)
    other = device_prior(device).name if prior is not None and prior.steps else ""
    return tuple(name for name in names if name != other)


def _of_pass(
    device: str, kind: OperatorKind, phase: Phase, element_nbytes: int, without: tuple[str, ...]
) -> RatePrior | None:
    """Return the prior of one pass from the rows of that pass alone."""
    prior = _prior(device, kind, phase, element_nbytes, without)
    if kind is not OperatorKind.GROUPED_LINEAR or prior is None or not prior.steps:
        return prior
    return _grouped(device, phase, element_nbytes, prior, without)


def _grouped(
    device: str, phase: Phase, element_nbytes: int, prior: RatePrior, without: tuple[str, ...]
) -> RatePrior:
    """Return the prior of grouped products on a generation without a table of them: slower than its
    plain products by the ratio in the tables that time both.

    The ratio transfers between generations better than a share of the data sheet does, since
    generations reach different shares with plain products.
    """
    plain = _prior(device, OperatorKind.LINEAR, phase, element_nbytes, without)
    grouped, linear = (
        {
            (one.device, one.table, one.element_nbytes): one.flop_log_factor
            for one in _sources(without)
            if one.pool == pool_name(kind, phase)
        }
        for kind in (OperatorKind.GROUPED_LINEAR, OperatorKind.LINEAR)
    )
    slower = [log - linear[where] for where, log in grouped.items() if where in linear]
    if plain is None or not slower:
        return prior
    place = prior.costs.index(WorkKind.FLOP)
    factors, sigmas = list(prior.log_factor), list(prior.sigma_log)
    factors[place] = plain.flop_log_factor + float(np.mean(slower))
    sigmas[place] = max(sigmas[place], plain.flop_sigma_log)
    return replace(prior, log_factor=tuple(factors), sigma_log=tuple(sigmas))


_BACKWARD_LOG = {OperatorFamily.LINEAR: 0.0, OperatorFamily.ATTENTION: 0.16}
"""Log of the seconds per backward FLOP over those per forward FLOP, in tables with both passes of
one kernel: products 0 within 0.08 (A100, H100 and B200, three tables), fused attention 0.16 (A100
0.18, B200 0.15; FlashAttention-3, Shah et al. 2024, figures 5 and 6, 0.1 to 0.2 for each kernel on
H100)."""


def _backward_of(
    forward: RatePrior | None, backward: RatePrior | None, more_log: float
) -> RatePrior | None:
    """Return the backward prior from the pass that was measured on a nearer device, and then in
    more tables.

    Forward passes are published for newer devices, narrower elements and newer kernels.
    """
    if forward is None or (backward is not None and _known(backward) <= _known(forward)):
        return backward
    is_flop = np.array([cost is WorkKind.FLOP for cost in forward.costs])
    return replace(
        forward, log_factor=tuple((np.array(forward.log_factor) + more_log * is_flop).tolist())
    )


def _known(prior: RatePrior) -> tuple[float, int]:
    return prior.steps, -len(prior.sources)


def pool_name(kind: OperatorKind, phase: Phase) -> str:
    """Return the name of an operator's rates in ``priors.json``.

    >>> pool_name(OperatorKind.LOGITS, Phase.FORWARD), pool_name(OperatorKind.NORM, Phase.BACKWARD)
    ('linear/forward', 'norm/backward')
    """
    return f"{(OperatorKind.LINEAR if kind.is_linear else kind).value}/{phase.value}"


def data_sheet(prior: DevicePrior, element_nbytes: int) -> Ceilings:
    """Return the rates that factors are relative to: peak rates of a GPU, and a microsecond a
    launch."""
    return replace(prior.peaks_for(element_nbytes), launch_s=_LAUNCH_S)


def generation(device: str) -> Generation:
    """Return the generation of a device by the name of its ``DevicePrior``.

    >>> generation("gh200").name, generation("unknown").name
    ('hopper', 'unknown')
    """
    return device_prior(device).generation


def sources_of(parsed: Mapping[str, Any]) -> tuple[SourceRates, ...]:
    """Return the entries of a parsed ``priors.json``."""
    return tuple(
        SourceRates(
            **{
                **row,
                "costs": tuple(WorkKind(c) for c in row["costs"]),
                "log_factor": tuple(row["log_factor"]),
                "sigma_log": tuple(row["sigma_log"]),
            }
        )
        for row in parsed["entries"]
    )


@cache
def _prior(
    device: str, kind: OperatorKind, phase: Phase, element_nbytes: int, without: tuple[str, ...]
) -> RatePrior | None:
    known = device_prior(device)
    if device == "cpu":
        return None
    device_generation = generation(device)
    groups: defaultdict[tuple[float, str, int], list[SourceRates]] = defaultdict(list)
    for source in _sources(without):
        if source.pool == pool_name(kind, phase):
            other = source.generation
            years = device_generation.years_to(other)
            if source.element_nbytes != element_nbytes:
                years += YEARS_A_STEP
            is_exact_match = (
                other.name == device_generation.name and source.element_nbytes == element_nbytes
            )
            steps = 0.0 if is_exact_match else max(years / YEARS_A_STEP, 1.0)
            groups[steps, other.name, source.element_nbytes].append(source)
    if not groups:
        return None
    nearest = min(groups, key=lambda k: (k[0], -sum(s.num_rows for s in groups[k]), k))
    sources = [*groups[nearest]]
    if _is_product(kind) and nearest[1] != device_generation.name:
        same_generation_keys = [key for key in groups if key[1] == device_generation.name]
        sources += groups[min(same_generation_keys)] if same_generation_keys else []
    return _joined(
        sources,
        _spreads(without)[family_name(kind)],
        kind=kind,
        steps=nearest[0],
        device=known,
        element_nbytes=element_nbytes,
    )


def _is_product(kind: OperatorKind) -> bool:
    return family(kind) in (OperatorFamily.LINEAR, OperatorFamily.ATTENTION)


def _moved_flop_log(source: SourceRates, device: DevicePrior, element_nbytes: int) -> float:
    """Return the log factor of the source's FLOP on the device: the same share of what large
    products reach there, which is the most; unchanged on one generation or if never measured."""
    there = device_prior(source.device).attainable(source.element_nbytes)
    here, log_factor = device.attainable(element_nbytes), source.flop_log_factor
    if source.generation == device.generation or not (there and here):
        return log_factor
    return max(log_factor + math.log(there.frac / here.frac), -math.log(here.frac))


def _joined(
    sources: Sequence[SourceRates],
    spread: Spread,
    *,
    kind: OperatorKind,
    steps: float,
    device: DevicePrior,
    element_nbytes: int,
) -> RatePrior:
    """Join factors as a mean weighted by precision, from each source's deviation and that between
    sources."""
    costs = sources[0].costs
    apart = np.array([spread.source[c] for c in costs]) ** 2
    moved = steps * np.array([spread.generation[c] for c in costs]) ** 2
    best = device.attainable(element_nbytes)
    if steps and best and family(kind) is OperatorFamily.LINEAR:
        moved[costs.index(WorkKind.FLOP)] = best.sigma_log**2
    weight = 1.0 / (np.array([s.sigma_log for s in sources]) ** 2 + apart)
    log_factors = np.array([s.log_factor for s in sources])
    if _is_product(kind):
        place = costs.index(WorkKind.FLOP)
        log_factors[:, place] = [_moved_flop_log(s, device, element_nbytes) for s in sources]
    else:
        weight = np.vstack([weight, [RATE_SIGMA_LOG[c] ** -2 for c in costs]])
        log_factors = np.vstack([log_factors, [BARE_LOG[c] for c in costs]])
    factor = (weight * log_factors).sum(axis=0) / weight.sum(axis=0)
    sigma = np.sqrt(apart + moved + 1.0 / weight.sum(axis=0))
    return RatePrior(
        sources=tuple(f"{s.device} {s.table}" for s in sources),
        steps=steps,
        ceilings=data_sheet(device, element_nbytes),
        num_units=device.num_units,
        costs=costs,
        log_factor=tuple(factor.tolist()),
        sigma_log=tuple(sigma.tolist()),
        log_power=float(np.mean([s.log_power for s in sources])),
        lead_frac=float(np.mean([s.lead_frac for s in sources])),
        shape_sigma_log=float(np.median([s.shape_sigma_log for s in sources])),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Deviation of a factor's log, by cost."""

    source: Mapping[WorkKind, float]
    """Deviation between a table and the mean of all tables of its generation."""
    generation: Mapping[WorkKind, float]
    """Deviation between generations in one table."""


def family_name(kind: OperatorKind) -> str:
    """Return the name of the operators whose sources are compared together: the family, or a kind
    for whole layers."""
    return kind.value if kind is OperatorKind.LAYER else family(kind).value


@cache
def _spreads(without: tuple[str, ...]) -> Mapping[str, Spread]:
    between: defaultdict[tuple[str, WorkKind], list[tuple[float, float]]] = defaultdict(list)
    across: defaultdict[tuple[str, WorkKind], list[tuple[float, float]]] = defaultdict(list)
    for one, other in _alike(_sources(without)):
        is_same_generation = one.generation == other.generation
        if is_same_generation == (one.table == other.table):
            continue
        differences = between if is_same_generation else across
        name = family_name(OperatorKind(one.pool.partition("/")[0]))
        for i, cost in enumerate(one.costs):
            doubt = one.sigma_log[i] ** 2 + other.sigma_log[i] ** 2
            trust = _WELL_KNOWN**2 / (_WELL_KNOWN**2 + doubt)
            differences[name, cost].append((abs(one.log_factor[i] - other.log_factor[i]), trust))
    return {
        name: Spread(
            source={cost: _spread(between[name, cost], cost) for cost in WorkKind},
            generation={cost: _spread(across[name, cost], cost) for cost in WorkKind},
        )
        for name in sorted({family_name(kind) for kind in OperatorKind})
    }


def _alike(sources: Iterable[SourceRates]) -> Iterator[tuple[SourceRates, SourceRates]]:
    """Yield pairs of sources that measured the same operator."""
    pools: defaultdict[tuple[str, int], list[SourceRates]] = defaultdict(list)
    for source in sources:
        pools[source.pool, source.element_nbytes].append(source)
    for members in pools.values():
        yield from combinations(members, 2)


def _spread(pairs: Sequence[tuple[float, float]], cost: WorkKind) -> float:
    """Return a deviation from the 90 % quantile of differences, shrunk in log to the usual one if
    pairs are few.

    >>> _spread([], WorkKind.FLOP)
    0.3
    """
    usual = RATE_SIGMA_LOG[cost]
    if not pairs:
        return usual
    apart, trust = np.array(sorted(pairs)).T
    level = (np.cumsum(trust) - trust / 2) / trust.sum()
    sigma = max(float(np.interp(0.9, level, apart)) / (np.sqrt(2.0) * Z_90), _WELL_KNOWN / 2)
    data_weight = float(trust.sum() / (trust.sum() + PRIOR_WEIGHT))
    return float(np.exp(data_weight * np.log(sigma) + (1 - data_weight) * np.log(usual)))


@cache
def _sources(without: tuple[str, ...]) -> tuple[SourceRates, ...]:
    assert __package__ is not None
    sources = sources_of(read_package_json(__package__, FILE))
    return tuple(s for s in sources if s.table not in without)
