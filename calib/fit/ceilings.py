"""The machine's ceilings, and how far each operator kind lies from them, from the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..workload.operators import Operator, OperatorKind, Phase
from .laws import Ceilings, Family, family, work
from .priors import DevicePrior
from .robust import robust_minimum

Key = tuple[OperatorKind, Phase]
# How far the work of one kind and phase may lie from the law (log, one sigma): products run at
# similar rates, pass counts of the rest are rough.
_WORK_SIGMA_LOG = {
    Family.LINEAR: 0.15,
    Family.ATTENTION: 0.7,
    Family.MEMORY: 0.7,
    Family.OPTIMIZER: 0.5,
}
# The same for its launches, whose relative numbers were counted.
_LAUNCH_SIGMA_LOG = 0.3
_SAMPLE_SIGMA_LOG = 0.1
_ENVELOPE_QUANTILE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class KindScale:
    """Factors on the law of one operator kind and phase."""

    launch: float = 1.0
    work: float = 1.0
    """On the time of FLOP and bytes: above 1 where they run below the ceilings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLaw:
    """Ceilings, with the factors of the kinds that were measured."""

    ceilings: Ceilings
    scales: Mapping[Key, KindScale] = field(default_factory=dict)

    def log_time(self, key: Key, operators: Sequence[Operator]) -> NDArray[np.float64]:
        """Log seconds of operators by the law, with the factors of ``key``; ``(operators,)``."""
        scale = self.scales.get(key) or self._typical(key)
        launches, flop, nbytes = costs(operators).T
        work_s = flop / self.ceilings.flop_per_s + nbytes / self.ceilings.bytes_per_s
        return np.log(launches * self.ceilings.launch_s * scale.launch + work_s * scale.work)

    def _typical(self, key: Key) -> KindScale:
        """Median factors of the family's other kinds in this phase."""
        others = [
            s
            for (kind, phase), s in self.scales.items()
            if family(kind) is family(key[0]) and phase is key[1]
        ]
        if not others:
            return KindScale()
        return KindScale(
            launch=float(np.median([s.launch for s in others])),
            work=float(np.median([s.work for s in others])),
        )


def costs(operators: Sequence[Operator]) -> NDArray[np.float64]:
    """Launches, FLOP and bytes of each operator, ``(operators, 3)``."""
    done = [work(o) for o in operators]
    return np.array([[w.num_launches, w.flop, w.nbytes] for w in done], dtype=np.float64)


def fit_law(
    operators: Sequence[Operator],
    time_s: NDArray[np.float64],
    weight: NDArray[np.float64],
    prior: DevicePrior,
) -> FittedLaw:
    """The rates and factors that explain the samples together.

    A maximum-a-posteriori fit of ``launches * launch_s + flop / flop_per_s + nbytes / bytes_per_s``
    in log time, with a factor on launches and one on work per operator kind and phase: what the
    samples do not identify stays at the prior.  The rates are then scaled to the envelope of the
    products, the 90 % quantile of their work rates; the factors take that back.
    """
    sizes = [o.element_nbytes for o in operators if o.kind.is_linear]
    assumed = prior.ceilings_for(int(np.median(sizes)) if sizes else 2)
    start = -np.log([assumed.launch_s, 1 / assumed.flop_per_s, 1 / assumed.bytes_per_s])
    groups: dict[Key, int] = {}
    group = np.array(
        [groups.setdefault((o.kind, o.phase), len(groups)) for o in operators], dtype=np.int64
    )
    families = [family(kind) for kind, _ in groups]
    problem = _Problem(
        costs=costs(operators),
        log_time=np.log(time_s),
        group=group,
        start=start,
        weight=np.sqrt(weight) / _SAMPLE_SIGMA_LOG,
        rate_sigma=prior.sigma_log,
        work_sigma=np.array([_WORK_SIGMA_LOG[f] for f in families]),
    )
    rates, launch, slower = problem.solve()
    chosen = np.array([f is Family.LINEAR for f in families])
    shift = -float(np.quantile(slower[chosen] if chosen.any() else slower, 1 - _ENVELOPE_QUANTILE))
    launches_per_s, flop_per_s, bytes_per_s = np.exp(rates + np.array([0, shift, shift])).tolist()
    return FittedLaw(
        ceilings=Ceilings(
            flop_per_s=flop_per_s, bytes_per_s=bytes_per_s, launch_s=1 / launches_per_s
        ),
        scales={
            key: KindScale(launch=float(np.exp(launch[i])), work=float(np.exp(slower[i] + shift)))
            for key, i in groups.items()
        },
    )


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
            self._residuals, self._jacobian, np.concatenate([self.start, np.zeros(2 * number)])
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
