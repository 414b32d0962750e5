"""The machine's ceilings, and how far each operator lies from them, from all samples together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..regressors.robust import SAMPLE_SIGMA_LOG, robust_minimum
from ..workload.operators import OperatorKind, Phase
from .batches import ShapeBatch, Timed, spread_rows
from .laws import Ceilings, OperatorFamily, columns, family
from .operator_kinds import KINDS, WorkKind
from .priors import DevicePrior

# How far the work of one kind and phase may lie from the law (log, one sigma): products run at
# similar rates, pass counts of the rest are rough.
_WORK_SIGMA_LOG = {
    OperatorFamily.LINEAR: 0.15,
    OperatorFamily.ATTENTION: 0.7,
    OperatorFamily.MEMORY: 0.7,
    OperatorFamily.OPTIMIZER: 0.5,
}
_CHAIN_WORK_SIGMA_LOG = 2.0
"""The same of a chain of calls.  Its bytes hide behind its launches, and without rotary positions
it only cuts its tensor, so that it identifies no rate of the machine."""
# The same for its launches, whose relative numbers were counted.
_LAUNCH_SIGMA_LOG = 0.3
_ENVELOPE_QUANTILE = 0.9
"""Nine tenths of the products run below the ceilings: the fastest few may be mistakes."""
_MOST_ROWS = 8
"""Samples of an operator that ceilings are fitted on, spread over its times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindScale:
    """Factors on the law of one operator."""

    launch: float = 1.0
    work: float = 1.0
    """On the time of FLOP and bytes: above 1 where they run below the ceilings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLaw:
    """Ceilings, with the factors of the operators that were measured."""

    ceilings: Ceilings
    num_units: int | None = None
    """Multiprocessors of the machine, as ``columns`` takes them."""
    scales: Mapping[str, KindScale] = field(default_factory=dict)
    keys: Mapping[str, tuple[OperatorKind, Phase]] = field(default_factory=dict)

    def typical(self, batch: ShapeBatch) -> KindScale:
        """Median factors of the measured operators of the batch's family and phase."""
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
        """Log seconds of one unit of each column, with the factors of ``name``."""
        scale = self.scales.get(name, KindScale())
        factors = [scale.launch if c is WorkKind.LAUNCH else scale.work for c in costs]
        return np.log([self.ceilings.unit_s(c) * f for c, f in zip(costs, factors, strict=True)])

    def log_time(self, batch: ShapeBatch, *, scale: KindScale | None = None) -> NDArray[np.float64]:
        """Log seconds of a batch by the law: launches, FLOP and bytes in sum, ``(rows,)``.

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
    """The rates and factors that explain the samples together.

    A maximum-a-posteriori fit of ``launches * launch_s + flop / flop_per_s + nbytes / bytes_per_s``
    in log time, with a factor on launches and one on work per operator: what the samples do not
    identify stays at the prior.  The rates are then scaled to the envelope of the products, the
    90 % quantile of their work rates; the factors take that back.
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
    kept: Sequence[Timed], families: Sequence[OperatorFamily], prior: DevicePrior
) -> _Problem:
    linear = [t for t, f in zip(kept, families, strict=True) if f is OperatorFamily.LINEAR]
    sizes = [t.batch.element_nbytes for t in linear]
    assumed = prior.ceilings_for(round(float(np.median(np.concatenate(sizes)))) if sizes else 2)
    return _Problem(
        costs=np.concatenate([columns(t.batch, prior.num_units).totals() for t in kept]),
        log_time=np.log(np.concatenate([t.time_s for t in kept])),
        group=np.repeat(np.arange(len(kept)), [len(t) for t in kept]),
        start=-np.log([assumed.launch_s, 1 / assumed.flop_per_s, 1 / assumed.bytes_per_s]),
        weight=np.sqrt(np.concatenate([t.weight for t in kept])) / SAMPLE_SIGMA_LOG,
        rate_sigma=prior.sigma_log,
        work_sigma=np.array([_work_sigma_log(t.batch.kind) for t in kept]),
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
        """Log rates (launches, FLOP, bytes), log launch factors and log work factors."""
        number = len(self.work_sigma)
        theta = robust_minimum(
            self._residuals,
            self._jacobian,
            np.concatenate([self.start, np.zeros(2 * number)]),
            spread=self._deviations(),
        )
        return theta[:3], theta[3 : 3 + number], theta[3 + number :]

    def _parts(self, theta: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of launches, FLOP and bytes of each sample, ``(samples, 3)``."""
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
