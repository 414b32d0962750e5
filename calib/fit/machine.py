"""All operators of one machine, fitted together, since they share its ceilings and the efficiency
of its products.

All samples together determine the machine's ceilings and each operator's distance from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ..regressors.robust import (
    SAMPLE_SIGMA_LOG,
    STUDENT_90,
    UNMEASURED_SIGMA_LOG,
    Z_90,
    robust_minimum,
    shrunk_sigma_log,
)
from ..workload.operators import OperatorKind, Phase
from ._outliers import Refusal, refuse
from ._pools import PoolModel, Residual, fit_pool
from ._rates import Rates
from .batches import ShapeBatch, Timed, spread_rows
from .laws import Ceilings, OperatorFamily, columns, family, least_s
from .operator_kinds import KINDS, Columns, WorkKind
from .priors import DevicePrior, device_prior
from .rate_priors import RATE_SIGMA_LOG, RatePrior, rates_prior

Vector = NDArray[np.float64]
_UNMEASURED_HALF_WIDTH = Z_90 * UNMEASURED_SIGMA_LOG
_CARRIED_FRAC, _CARRIED_SIGMA = 0.5, 0.75
"""Share of the regressors' correction that is transferred to another device; deviation of the rest,
relative to it."""
CARRIED_OPERATOR_SIGMA_LOG = 0.2
"""Deviation of a whole operator from a transferred model, in log time."""
_ENOUGH_SHAPES = 8
"""Shapes of an operator from which its own residuals determine its error."""
# Deviation (log) of the work of one kind and phase from the law: products run at similar rates,
# pass counts of the others are rough.
_WORK_SIGMA_LOG = {
    OperatorFamily.LINEAR: 0.15,
    OperatorFamily.ATTENTION: 0.7,
    OperatorFamily.MEMORY: 0.7,
    OperatorFamily.OPTIMIZER: 0.5,
    OperatorFamily.OPAQUE: 0.7,
}
_CHAIN_WORK_SIGMA_LOG = 2.0
"""Work deviation of a chain of calls. Its bytes hide behind its launches, and without rotary
positions it only cuts its tensor, so that it identifies no rate of the machine."""
# Deviation (log) of the launches from the law, whose relative numbers were counted.
_LAUNCH_SIGMA_LOG = 0.3
_ENVELOPE_QUANTILE = 0.9
"""Nine tenths of the products run below the ceilings; the fastest few may be errors."""
_MOST_ROWS = 8
"""Samples per operator used to fit ceilings, spread over its times."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """Natural logs of seconds, ``(rows,)`` each."""

    log_time: Vector
    low: Vector
    high: Vector
    """Ends of the 90 % interval of one measurement."""
    octaves: Vector
    """Doublings outside the measured range; 0 inside."""

    @property
    def sigma_log(self) -> Vector:
        """Standard deviation of log time of a normal error with this interval."""
        return (self.high - self.low) / (2 * Z_90)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MachineModel:
    """Fitted models of the operators of one machine, by name."""

    law: FittedLaw
    prior: DevicePrior
    element_nbytes: int
    """Usual size of an element."""
    pools: Mapping[str, PoolModel]
    """Pools by the name of their operators."""
    thin_sigma_log: float
    """Additional deviation of an operator with one known shape, on top of its pool's own."""
    refusals: tuple[Refusal, ...]
    """Rows that no model was fitted on."""
    without: tuple[str, ...] | None
    """Public tables that the prior left out; None if no prior was used."""
    is_moved: bool
    """True if the pools were fitted on another machine."""
    shift: Mapping[WorkKind, float]
    """Log ratio of this machine's seconds per launch, FLOP and byte to those of the machine that
    the pools were fitted on; 0 if it is the same machine."""
    shift_sigma: Mapping[WorkKind, float] = field(default_factory=dict)
    """Deviation of each shift."""
    probed: Mapping[str, PoolModel] = field(default_factory=dict)
    """Pools fitted to the residuals of this machine's probes, by name."""

    @property
    def ceilings(self) -> Ceilings:
        """Rates of the machine."""
        return self.law.ceilings

    def predict(self, name: str, batch: ShapeBatch) -> Prediction:
        """Return the times of a batch of the operator ``name``."""
        pool = self.pools[name]
        residual = pool.predict(name, batch)
        thin = max(1.0 - pool.shapes_of[name] / _ENOUGH_SHAPES, 0.0)
        sigma = np.hypot(residual.sigma_log, np.sqrt(thin) * self.thin_sigma_log)
        log_time = residual.law + residual.detail
        if self.is_moved:
            log_time = self.transferable_log_time(residual) + self.machine_shift_log(name, batch)
            sigma = np.hypot(sigma, _CARRIED_SIGMA * pool.detail_sigma[name])
            sigma = np.hypot(sigma, self._doubt(name, batch))
        if name in self.probed:
            there = self.probed[name].predict(name, batch)
            log_time, sigma = log_time + there.detail, there.sigma_log
        half = STUDENT_90 * sigma
        is_roofline_valid = not any(r.name == name and r.is_impossible for r in self.refusals)
        least = self._least_log_s(batch) if is_roofline_valid else -np.inf
        log_time = np.maximum(log_time, least)
        low = np.maximum(log_time - half, least)
        return Prediction(
            log_time=log_time, low=low, high=log_time + half, octaves=residual.octaves
        )

    def _least_log_s(self, batch: ShapeBatch) -> Vector | float:
        """Return the log of the least time that this data sheet allows."""
        if not self.prior.num_units:
            return -np.inf
        with np.errstate(divide="ignore"):
            return np.log(least_s(batch, self.prior.peaks_for))

    def predict_unmeasured(self, batch: ShapeBatch) -> Prediction:
        """Return the times of operators without samples; octaves are infinite.

        A product uses the pool of the measured products; another operator uses public tables of the
        device for elements of its width, or the bare law if there are none. Each row is priced by
        itself.
        """
        log_time, half = np.empty(len(batch)), np.empty(len(batch))
        for width in np.unique(batch.element_nbytes):
            rows = np.flatnonzero(batch.element_nbytes == width)
            log_time[rows], half[rows] = self._unmeasured(batch.take(rows))
        least = self._least_log_s(batch)
        log_time = np.maximum(log_time, least)
        return Prediction(
            log_time=log_time,
            low=np.maximum(log_time - half, least),
            high=log_time + half,
            octaves=np.full(len(batch), np.inf),
        )

    def _unmeasured(self, batch: ShapeBatch) -> tuple[Vector, Vector | float]:
        """Return log seconds and half widths of rows whose elements all have one width."""
        like = next(
            (
                name
                for name, (kind, phase) in self.law.keys.items()
                if batch.kind.is_linear and kind.is_linear and phase is batch.phase
            ),
            None,
        )
        if like is not None:
            residual = self.pools[like].predict("", batch)
            log_time = residual.law + residual.detail + self.machine_shift_log(like, batch)
            return log_time, _UNMEASURED_HALF_WIDTH
        known = _rates_prior(self.prior, batch, self.without)
        if known is not None:
            return known.log_time(batch), STUDENT_90 * known.sigma_log_time(batch)
        return self.law.log_time(batch, scale=self.law.typical(batch)), _UNMEASURED_HALF_WIDTH

    def _doubt(self, name: str, batch: ShapeBatch) -> Vector:
        """Return the deviation of a transferred operator without probes, ``(rows,)``."""
        sigma = np.array([self.shift_sigma.get(cost, 0.0) for cost in WorkKind])
        of_rates = ((self.slopes(name, batch) * sigma) ** 2).sum(axis=1)
        return np.sqrt(of_rates + CARRIED_OPERATOR_SIGMA_LOG**2)

    def target_rates(self, name: str, batch: ShapeBatch) -> Rates:
        """Return the constants of the operator's law on this machine."""
        return self._there(self.pools[name], columns(batch, self.pools[name].num_units))

    def slopes(self, name: str, batch: ShapeBatch) -> NDArray[np.float64]:
        """Return the derivative of log time by the shift of each ``WorkKind``, in order,
        ``(rows, costs)``."""
        done = columns(batch, self.pools[name].num_units)
        of_columns = self._there(self.pools[name], done).slopes(done)
        is_of = np.array([[column is cost for cost in WorkKind] for column in done.costs])
        return of_columns @ is_of.astype(np.float64)

    @staticmethod
    def transferable_log_time(residual: Residual) -> Vector:
        """Return the part of log seconds that is transferred to another machine, without its rates,
        ``(rows,)``."""
        return residual.law + _CARRIED_FRAC * residual.detail

    def machine_shift_log(self, name: str, batch: ShapeBatch) -> Vector:
        """Return the change of log time between the machines by the law, ``(rows,)``."""
        if not self.is_moved:
            return np.zeros(len(batch))
        pool = self.pools[name]
        done = columns(batch, pool.num_units)
        return self._there(pool, done).log_time(done) - pool.rates.log_time(done)

    def _there(self, pool: PoolModel, done: Columns) -> Rates:
        """Return the pool's constants on this machine."""
        shift = np.array([self.shift[c] for c in done.costs])
        return replace(pool.rates, log_unit_s=pool.rates.log_unit_s + shift)


def fit_machine(
    groups: Mapping[str, Timed],
    *,
    device: str,
    use_prior: bool = False,
    without: tuple[str, ...] = (),
) -> MachineModel:
    """Fit the operators of one device; the same rows in any order give the same model.

    ``groups`` maps a name to rows of one kind and phase and may be empty with ``use_prior``, which
    starts each operator at the public tables of the device's generation, except the tables in
    ``without``; ``device`` is the driver's name.
    """
    prior = device_prior(device)
    ordered = {name: _ordered(groups[name]) for name in sorted(groups)}
    groups, refusals = refuse(ordered, prior.peaks_for if prior.num_units else None)
    excluded = without if use_prior else None
    # Matrices this small are slower in threads, and training needs the cores.
    with threadpool_limits(limits=1):
        law = fit_law(groups, prior)
        pools = _pools(groups, law, prior, excluded)
    return MachineModel(
        law=law,
        prior=prior,
        element_nbytes=_element_nbytes(groups),
        pools=pools,
        thin_sigma_log=_thin_sigma_log(pools, prior),
        without=excluded,
        is_moved=False,
        shift=dict.fromkeys(WorkKind, 0.0),
        refusals=refusals,
    )


def _thin_sigma_log(pools: Mapping[str, PoolModel], prior: DevicePrior) -> float:
    """Return the deviation of held-out residuals of operators with few shapes, shrunk to the
    device's prior."""
    residuals = [
        pool.held_out_residuals[name]
        for name, pool in sorted(pools.items())
        if pool.num_shapes > 1 and pool.shapes_of[name] < _ENOUGH_SHAPES
    ]
    return shrunk_sigma_log(
        np.concatenate([np.empty(0), *residuals]), prior_sigma_log=prior.error_sigma_log
    )


def _element_nbytes(groups: Mapping[str, Timed]) -> int:
    """Return the usual bytes of an element in products, or in all operators if there are no
    products; else 2."""
    products = [t for t in groups.values() if t.batch.kind.is_linear]
    sizes = [t.batch.element_nbytes for t in products or groups.values()]
    return int(np.median(np.concatenate(sizes))) if sizes else 2


def _pools(
    groups: Mapping[str, Timed],
    law: FittedLaw,
    prior: DevicePrior,
    without: tuple[str, ...] | None,
) -> dict[str, PoolModel]:
    """Return the pool of each name: products of one phase share one, every other operator has its
    own."""
    members: defaultdict[str, dict[str, Timed]] = defaultdict(dict)
    for name, timed in groups.items():
        batch = timed.batch
        pool = f"linear/{batch.phase.value}" if batch.kind.is_linear else name
        members[pool][name] = timed
    pools = {}
    for pool_members in members.values():
        pools.update(dict.fromkeys(pool_members, _fit(pool_members, law, prior, without)))
    return pools


def _fit(
    members: Mapping[str, Timed],
    law: FittedLaw,
    prior: DevicePrior,
    without: tuple[str, ...] | None,
) -> PoolModel:
    """Fit one pool; its rates start at a precision-weighted mean of the machine's samples and
    public tables."""
    batch = next(iter(members.values())).batch
    costs = columns(batch, prior.num_units).costs
    start = np.median([law.log_units(name, costs) for name in members], axis=0)
    sigma = np.array([RATE_SIGMA_LOG[c] for c in costs])
    known = _rates_prior(prior, batch, without)
    if known is not None:
        start_precision, others = sigma**-2.0, np.array(known.sigma_log) ** -2.0
        start = (start_precision * start + others * known.rates.log_unit_s) / (
            start_precision + others
        )
        sigma = (start_precision + others) ** -0.5
    least, start, sigma = _products_prior(prior, batch, costs, start, sigma)
    return fit_pool(members, start=start, sigma=sigma, num_units=prior.num_units, least=least)


def _products_prior(
    prior: DevicePrior, batch: ShapeBatch, costs: Sequence[WorkKind], start: Vector, sigma: Vector
) -> tuple[Vector | None, Vector, Vector]:
    """Return floors of a GPU's log seconds per FLOP, and the prior combined with the share of the
    data sheet that large products reach: small shapes alone do not determine it."""
    is_product = family(batch.kind) in (OperatorFamily.LINEAR, OperatorFamily.ATTENTION)
    if not (prior.num_units and is_product):
        return None, start, sigma
    nbytes = int(np.median(batch.element_nbytes))
    sheet, best = -np.log(prior.peaks_for(nbytes).flop_per_s), prior.attainable(nbytes)
    is_flop = np.array([cost is WorkKind.FLOP for cost in costs])
    least = np.where(is_flop, sheet - np.log(best.ceiling_frac if best else 1.0), -np.inf)
    if best is None or not batch.kind.is_linear:
        return least, start, sigma
    start_precision, others = sigma**-2.0, is_flop * best.sigma_log**-2.0
    start = (start_precision * start + others * (sheet - np.log(best.frac))) / (
        start_precision + others
    )
    return least, start, (start_precision + others) ** -0.5


def _rates_prior(
    prior: DevicePrior, batch: ShapeBatch, without: tuple[str, ...] | None
) -> RatePrior | None:
    """Return the public tables' rates of the batch's operator; None if they are not requested or
    have none."""
    if without is None:
        return None
    nbytes = int(np.median(batch.element_nbytes))
    return rates_prior(prior.name, batch.kind, batch.phase, nbytes, without=without)


def _ordered(timed: Timed) -> Timed:
    """Sort rows independently of their input order."""
    keys = (timed.weight, timed.time_s, timed.batch.element_nbytes, *timed.batch.sizes.T)
    return timed.take(np.lexsort(keys))


@dataclass(frozen=True, slots=True, kw_only=True)
class KindScale:
    """Factors on the law of one operator."""

    launch: float = 1.0
    work: float = 1.0
    """Factor on the time of FLOP and bytes: above 1 if they run below the ceilings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLaw:
    """Ceilings and the factors of the measured operators."""

    ceilings: Ceilings
    num_units: int | None = None
    """Multiprocessors of the machine, as ``columns`` takes them."""
    scales: Mapping[str, KindScale] = field(default_factory=dict)
    keys: Mapping[str, tuple[OperatorKind, Phase]] = field(default_factory=dict)

    def typical(self, batch: ShapeBatch) -> KindScale:
        """Return the median factors of the measured operators of the batch's family and phase."""
        others = [
            self.scales[name]
            for name, (kind, phase) in self.keys.items()
            if family(kind) is family(batch.kind) and phase is batch.phase
        ]
        if not others:
            return KindScale()
        return KindScale(
            launch=float(np.median([s.launch for s in others])),
            work=float(np.median([s.work for s in others])),
        )

    def log_units(self, name: str, costs: tuple[WorkKind, ...]) -> NDArray[np.float64]:
        """Return the log seconds of one unit of each column, with the factors of ``name``."""
        scale = self.scales.get(name, KindScale())
        factors = [scale.launch if c is WorkKind.LAUNCH else scale.work for c in costs]
        return np.log([self.ceilings.unit_s(c) * f for c, f in zip(costs, factors, strict=True)])

    def log_time(self, batch: ShapeBatch, *, scale: KindScale | None = None) -> NDArray[np.float64]:
        """Return the log seconds of a batch by the law: the sum of launches, FLOP and bytes,
        ``(rows,)``.

        The sum fits measured products better than the maximum, above all in the backward phase.

        >>> from .batches import batch_of
        >>> from ..workload.operators import Operator
        >>> norm = Operator(kind=OperatorKind.NORM, phase=Phase.FORWARD, shape=(1000, 1000),
        ...                 element_nbytes=4)
        >>> law = FittedLaw(ceilings=Ceilings(flop_per_s=1e12, bytes_per_s=1e10, launch_s=1e-5))
        >>> np.exp(law.log_time(batch_of([norm]))).round(9).tolist()
        [0.00123]
        """
        used = scale or KindScale()
        launches, flop, nbytes = columns(batch, self.num_units).totals().T
        work_s = flop / self.ceilings.flop_per_s + nbytes / self.ceilings.bytes_per_s
        return np.log(launches * self.ceilings.launch_s * used.launch + work_s * used.work)


def fit_law(groups: Mapping[str, Timed], prior: DevicePrior) -> FittedLaw:
    """Fit the rates and factors that explain all samples together.

    A maximum-a-posteriori fit of ``launches * launch_s + flop / flop_per_s + nbytes / bytes_per_s``
    in log time, with a factor on launches and one on work per operator; constants that the samples
    do not identify stay at the prior. The rates are then scaled to the envelope of the products,
    the 90 % quantile of their work rates, and the factors compensate for it.
    """
    if not groups:
        return FittedLaw(ceilings=prior.ceilings, num_units=prior.num_units)
    names = sorted(groups)
    families = [family(groups[name].batch.kind) for name in names]
    rates, launch, slower = _problem([_few(groups[n]) for n in names], families, prior).solve()
    chosen = np.array([f is OperatorFamily.LINEAR for f in families])
    shift = -float(np.quantile(slower[chosen] if chosen.any() else slower, 1 - _ENVELOPE_QUANTILE))
    launches_per_s, flop_per_s, bytes_per_s = np.exp(rates + np.array([0, shift, shift])).tolist()
    return FittedLaw(
        ceilings=Ceilings(
            flop_per_s=flop_per_s, bytes_per_s=bytes_per_s, launch_s=1 / launches_per_s
        ),
        scales={
            name: KindScale(launch=float(np.exp(launch[i])), work=float(np.exp(slower[i] + shift)))
            for i, name in enumerate(names)
        },
        num_units=prior.num_units,
        keys={name: (groups[name].batch.kind, groups[name].batch.phase) for name in names},
    )


def _problem(
    groups: Sequence[Timed], families: Sequence[OperatorFamily], prior: DevicePrior
) -> _Problem:
    linear = [t for t, f in zip(groups, families, strict=True) if f is OperatorFamily.LINEAR]
    sizes = [t.batch.element_nbytes for t in linear]
    assumed = prior.ceilings_for(round(float(np.median(np.concatenate(sizes)))) if sizes else 2)
    return _Problem(
        costs=np.concatenate([columns(t.batch, prior.num_units).totals() for t in groups]),
        log_time=np.log(np.concatenate([t.time_s for t in groups])),
        group=np.repeat(np.arange(len(groups)), [len(t) for t in groups]),
        start=-np.log([assumed.launch_s, 1 / assumed.flop_per_s, 1 / assumed.bytes_per_s]),
        weight=np.sqrt(np.concatenate([t.weight for t in groups])) / SAMPLE_SIGMA_LOG,
        rate_sigma=prior.sigma_log,
        work_sigma=np.array([_work_sigma_log(t.batch.kind) for t in groups]),
    )


def _work_sigma_log(kind: OperatorKind) -> float:
    return _CHAIN_WORK_SIGMA_LOG if KINDS[kind].is_chain else _WORK_SIGMA_LOG[family(kind)]


def _few(timed: Timed) -> Timed:
    return timed.take(spread_rows(timed.batch.sizes, timed.time_s, _MOST_ROWS))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """Samples ``(samples,)`` and priors; unknowns are three log rates and two factors per group."""

    costs: NDArray[np.float64]
    log_time: NDArray[np.float64]
    weight: NDArray[np.float64]
    group: NDArray[np.int64]
    start: NDArray[np.float64]
    rate_sigma: float
    work_sigma: NDArray[np.float64]

    def solve(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return log rates (launches, FLOP, bytes), log launch factors and log work factors."""
        number = len(self.work_sigma)
        theta = robust_minimum(
            self._residuals,
            self._jacobian,
            np.concatenate([self.start, np.zeros(2 * number)]),
            spread=self._deviations(),
        )
        return theta[:3], theta[3 : 3 + number], theta[3 + number :]

    def _parts(self, theta: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of launches, FLOP and bytes of each sample, ``(samples, 3)``."""
        number = len(self.work_sigma)
        launch, slower = theta[3 : 3 + number][self.group], theta[3 + number :][self.group]
        factors = np.column_stack([launch, slower, slower])
        return self.costs * np.exp(factors - theta[:3])

    def _deviations(self) -> NDArray[np.float64]:
        return np.concatenate(
            [
                np.full(3, self.rate_sigma),
                np.full(len(self.work_sigma), _LAUNCH_SIGMA_LOG),
                self.work_sigma,
            ]
        )

    def _residuals(self, theta: NDArray[np.float64]) -> NDArray[np.float64]:
        data = (np.log(self._parts(theta).sum(axis=1)) - self.log_time) * self.weight
        center = np.concatenate([self.start, np.zeros(len(theta) - 3)])
        return np.concatenate([data, (theta - center) / self._deviations()])

    def _jacobian(self, theta: NDArray[np.float64]) -> NDArray[np.float64]:
        samples, number = np.arange(len(self.group)), len(self.work_sigma)
        parts = self._parts(theta)
        shares = parts / parts.sum(axis=1, keepdims=True) * self.weight[:, None]
        out = np.zeros((len(samples), len(theta)))
        out[:, :3] = -shares
        out[samples, 3 + self.group] = shares[:, 0]
        out[samples, 3 + number + self.group] = shares[:, 1] + shares[:, 2]
        return np.concatenate([out, np.diag(1 / self._deviations())])
