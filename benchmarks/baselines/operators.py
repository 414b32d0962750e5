"""Baselines for the operator models, scored on the same splits.

- ``PaperRecipe``: Zhang et al., "Efficient Fine-Grained GPU Performance Modeling for Distributed
  Deep Learning of LLM" (arXiv:2509.22832): a random forest or boosted trees on the sizes and the
  raw time of each operator and phase, chosen by a search over their settings.
- ``ConstantEfficiency``: the roofline at the rates of the data sheet, times one constant.

Their 90 % intervals are split-conformal: one quantile of the relative errors of rows held out of an
inner fit.  Each group is fitted on first use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestRegressor
from sklearn.model_selection import KFold, cross_val_predict
from xgboost import XGBRegressor

from forerun.benchmarks.protocols.operators import Fit, Transfer
from forerun.calib.fit import (
    DevicePrior,
    Prediction,
    ShapeBatch,
    Timed,
    columns,
    device_prior,
    fit_machine,
    transfer_to_device,
)

Vector = NDArray[np.float64]
US_PER_S = 1e6
FOLDS = 3
FEWEST_ROWS = 4
"""Fewest rows for a search of settings and for held-out rows."""
LEVEL = 0.9
UNKNOWN_FRAC = 1.0
"""Half-width if no row could be held out."""
LEAST_FRAC = 0.01
"""Lower bound of a prediction relative to the shortest measured time, and of an interval's low end
relative to its prediction."""
NUM_TREES = 100
BOOSTED = ({"max_depth": 3}, {"max_depth": 9})
"""Settings searched here, besides one forest of unlimited depth: a part of the published grid
(100-500 trees of unlimited depth, 10 or 20; 100-300 boosted trees 3-9 deep at rates of 0.1 and
0.2).  All boosted models have 100 trees at a rate of 0.2 on 80 % of the rows."""


class Method(Protocol):
    """A way to fit operator models: ours or a baseline."""

    @property
    def fit(self) -> Fit: ...
    @property
    def transfer(self) -> Transfer: ...


@dataclass(frozen=True, slots=True)
class ForerunModels:
    """The package's own models, without a prior unless ``fit`` supplies one."""

    fit: Fit = fit_machine
    transfer: Transfer = transfer_to_device


def around(log_time: Vector, frac: float) -> Prediction:
    """Return predictions with the same relative half-width on every row."""
    low = log_time + np.log(max(1.0 - frac, LEAST_FRAC))
    high = log_time + np.log1p(frac)
    return Prediction(log_time=log_time, low=low, high=high, octaves=np.zeros(len(log_time)))


def conformal_frac(errors: Vector) -> float:
    """Return the half-width that covers 90 % of new errors, given errors of held-out rows.

    >>> conformal_frac(np.arange(1.0, 20.0))
    18.0
    """
    if not len(errors):
        return UNKNOWN_FRAC
    rank = min(math.ceil(LEVEL * (len(errors) + 1)), len(errors))
    return float(np.sort(np.abs(errors))[rank - 1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawTime:
    """Regressor of one group on raw sizes and microseconds."""

    regressor: Any
    least_s: float
    half_width_frac: float

    def predict(self, batch: ShapeBatch) -> Prediction:
        time_s = self.regressor.predict(_sizes(batch)) / US_PER_S
        return around(np.log(np.maximum(time_s, self.least_s)), self.half_width_frac)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawTimeModel:
    """Regressors of all groups of one device."""

    groups: Mapping[str, Timed]
    fitted: dict[str, RawTime] = field(default_factory=dict)

    def predict(self, name: str, batch: ShapeBatch) -> Prediction:
        """Return the predicted times of a batch of one group."""
        if name not in self.fitted:
            self.fitted[name] = fit_raw_time(self.groups[name])
        return self.fitted[name].predict(batch)


class PaperRecipe:
    """The published recipe; it transfers to another device only by assuming equal times."""

    def fit(self, groups: Mapping[str, Timed], *, device: str) -> RawTimeModel:
        """Fit all groups of a device; the device itself is not used."""
        del device
        return RawTimeModel(groups=groups)

    def transfer(
        self, source: RawTimeModel, *, device: str, probes: Mapping[str, Timed]
    ) -> RawTimeModel:
        """Return the source model, as if both devices took equal times."""
        del device, probes
        return source


def fit_raw_time(timed: Timed) -> RawTime:
    """Return the regressor with the least mean relative error on held-out rows."""
    sizes, time_us = _sizes(timed.batch), US_PER_S * timed.time_s
    least_s = LEAST_FRAC * float(timed.time_s.min())
    forest = RandomForestRegressor(
        NUM_TREES, oob_score=len(timed) >= FEWEST_ROWS, n_jobs=1, random_state=0
    ).fit(sizes, time_us)
    if len(timed) < FEWEST_ROWS:
        return RawTime(regressor=forest, least_s=least_s, half_width_frac=UNKNOWN_FRAC)
    candidates = [(_errors(forest.oob_prediction_, time_us, least_s), forest)]
    for settings in BOOSTED:
        folds = KFold(FOLDS, shuffle=True, random_state=0)
        cv_time_us = cross_val_predict(_boosted(settings), sizes, time_us, cv=folds).astype(float)
        candidates.append((_errors(cv_time_us, time_us, least_s), _boosted(settings)))
    errors, regressor = min(candidates, key=lambda one: _mape(one[0]))
    if regressor is not forest:
        regressor.fit(sizes, time_us)
    return RawTime(regressor=regressor, least_s=least_s, half_width_frac=conformal_frac(errors))


def _boosted(settings: Mapping[str, Any]) -> XGBRegressor:
    return XGBRegressor(
        n_estimators=NUM_TREES,
        learning_rate=0.2,
        subsample=0.8,
        n_jobs=1,
        random_state=0,
        **settings,
    )


def _sizes(batch: ShapeBatch) -> NDArray[np.float64]:
    return np.column_stack([batch.sizes, batch.element_nbytes])


def _errors(predicted_us: Vector, time_us: Vector, least_s: float) -> Vector:
    """Return measured over predicted time, minus one."""
    return time_us / np.maximum(predicted_us, US_PER_S * least_s) - 1.0


def _mape(errors: Vector) -> float:
    """Return the mean absolute error relative to the measured time."""
    return float(np.mean(np.abs(1.0 / (1.0 + errors) - 1.0)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Roofline:
    """Roofline of a device, times one constant per group."""

    prior: DevicePrior
    log_factor: Mapping[str, float]
    half_width_frac: Mapping[str, float]

    def predict(self, name: str, batch: ShapeBatch) -> Prediction:
        """Return the predicted times of a batch of one group."""
        log_time = roofline_log_s(batch, self.prior) + self.log_factor[name]
        return around(log_time, self.half_width_frac[name])


class ConstantEfficiency:
    """Baseline with one efficiency per group."""

    def fit(self, groups: Mapping[str, Timed], *, device: str) -> Roofline:
        """Fit the median of measured time over the roofline, per group."""
        prior = device_prior(device)
        ratios = {
            name: np.log(timed.time_s) - roofline_log_s(timed.batch, prior)
            for name, timed in groups.items()
        }
        return Roofline(
            prior=prior,
            log_factor={name: float(np.median(log_ratio)) for name, log_ratio in ratios.items()},
            half_width_frac={
                name: conformal_frac(np.expm1(leave_one_out_residuals(log_ratio)))
                for name, log_ratio in ratios.items()
            },
        )

    def transfer(self, source: Roofline, *, device: str, probes: Mapping[str, Timed]) -> Roofline:
        """Return the same efficiencies on the roofline of the other device."""
        del probes
        return replace(source, prior=device_prior(device))


def roofline_log_s(batch: ShapeBatch, prior: DevicePrior) -> Vector:
    """Return log seconds at data-sheet rates: FLOP or bytes, whichever takes longer."""
    _, flop, nbytes = columns(batch).totals().T
    peaks = [prior.peaks_for(int(n)) for n in batch.element_nbytes]
    flop_s = flop / np.array([p.flop_per_s for p in peaks])
    return np.log(np.maximum(flop_s, nbytes / np.array([p.bytes_per_s for p in peaks])))


def leave_one_out_residuals(values: Vector) -> Vector:
    """Return each value minus the median of all others; empty if there are no others.

    >>> leave_one_out_residuals(np.array([1.0, 2.0, 4.0, 8.0])).tolist()
    [-3.0, -2.0, 2.0, 6.0]
    """
    if len(values) < 2:
        return np.empty(0)
    ordered, rank = np.sort(values), np.arange(len(values))
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    return ordered - (ordered[low + (rank <= low)] + ordered[high + (rank <= high)]) / 2


def with_prior(without: str) -> Method:
    """Return the package's own models, with priors from all public tables but ``without``."""
    return ForerunModels(partial(fit_machine, use_prior=True, without=(without,)))
