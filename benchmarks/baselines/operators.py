"""What operator models are compared with, on the same splits.

- ``PaperRecipe``: Zhang et al., "Efficient Fine-Grained GPU Performance Modeling for Distributed
  Deep Learning of LLM" (arXiv:2509.22832): a random forest or boosted trees on the sizes and the
  raw time of each operator and phase, chosen by a search over their settings.
- ``ConstantEfficiency``: the roofline at the rates of the data sheet, times one constant.

Their 90 % intervals are split-conformal: one quantile of the relative errors of rows that were left
out of an inner fit.  Each group is fitted when it is first asked for.
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
    transfer,
)

Vector = NDArray[np.float64]
US_PER_S = 1e6
FOLDS = 3
FEWEST_ROWS = 4
"""Rows below which nothing is searched or left out."""
LEVEL = 0.9
UNKNOWN_FRAC = 1.0
"""Half-width where no row could be left out."""
LEAST_FRAC = 0.01
"""Least of a prediction over the shortest time seen, and of a low end over its prediction."""
NUM_TREES = 100
BOOSTED = ({"max_depth": 3}, {"max_depth": 9})
"""Of the published grid (100-500 trees deep without limit, 10 or 20; 100-300 boosted trees 3-9
deep at rates of 0.1 and 0.2) what is searched here, beside one forest of unlimited depth: all
boosted ones have 100 trees at a rate of 0.2 on 80 % of the rows."""


class Method(Protocol):
    """A way to make models: ours, or a baseline."""

    @property
    def fit(self) -> Fit: ...
    @property
    def transfer(self) -> Transfer: ...


@dataclass(frozen=True, slots=True)
class OwnModels:
    """The package's own models, without a prior unless the fit has one."""

    fit: Fit = fit_machine
    transfer: Transfer = transfer


def around(log_time: Vector, frac: float) -> Prediction:
    """The same relative half-width on every row."""
    low = log_time + np.log(max(1.0 - frac, LEAST_FRAC))
    high = log_time + np.log1p(frac)
    return Prediction(log_time=log_time, low=low, high=high, octaves=np.zeros(len(log_time)))


def conformal_frac(errors: Vector) -> float:
    """The half-width that holds 90 % of new errors, from errors of left-out rows.

    >>> conformal_frac(np.arange(1.0, 20.0))
    18.0
    """
    if not len(errors):
        return UNKNOWN_FRAC
    rank = min(math.ceil(LEVEL * (len(errors) + 1)), len(errors))
    return float(np.sort(np.abs(errors))[rank - 1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawTime:
    """One group's regressor on raw sizes and microseconds."""

    regressor: Any
    least_s: float
    half_width_frac: float

    def predict(self, batch: ShapeBatch) -> Prediction:
        time_s = self.regressor.predict(_sizes(batch)) / US_PER_S
        return around(np.log(np.maximum(time_s, self.least_s)), self.half_width_frac)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawTimeModel:
    """All groups of one device."""

    groups: Mapping[str, Timed]
    fitted: dict[str, RawTime] = field(default_factory=dict)

    def predict(self, name: str, batch: ShapeBatch) -> Prediction:
        """The times of a batch of one group."""
        if name not in self.fitted:
            self.fitted[name] = fit_raw_time(self.groups[name])
        return self.fitted[name].predict(batch)


class PaperRecipe:
    """The published recipe; it has nothing to carry to another device but its times."""

    def fit(self, groups: Mapping[str, Timed], *, device: str) -> RawTimeModel:
        """All groups of a device, whatever it is."""
        del device
        return RawTimeModel(groups=groups)

    def transfer(
        self, source: RawTimeModel, *, device: str, probes: Mapping[str, Timed]
    ) -> RawTimeModel:
        """The times of the other device."""
        del device, probes
        return source


def fit_raw_time(timed: Timed) -> RawTime:
    """The regressor whose left-out rows have the least mean relative error."""
    sizes, time_us = _sizes(timed.batch), US_PER_S * timed.time_s
    least_s = LEAST_FRAC * float(timed.time_s.min())
    forest = RandomForestRegressor(
        NUM_TREES, oob_score=len(timed) >= FEWEST_ROWS, n_jobs=1, random_state=0
    ).fit(sizes, time_us)
    if len(timed) < FEWEST_ROWS:
        return RawTime(regressor=forest, least_s=least_s, half_width_frac=UNKNOWN_FRAC)
    found = [(_errors(forest.oob_prediction_, time_us, least_s), forest)]
    for settings in BOOSTED:
        folds = KFold(FOLDS, shuffle=True, random_state=0)
        left_out = cross_val_predict(_boosted(settings), sizes, time_us, cv=folds).astype(float)
        found.append((_errors(left_out, time_us, least_s), _boosted(settings)))
    errors, regressor = min(found, key=lambda one: _mape(one[0]))
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
    """Measured over predicted, less one."""
    return time_us / np.maximum(predicted_us, US_PER_S * least_s) - 1.0


def _mape(errors: Vector) -> float:
    """Mean absolute error relative to what was measured."""
    return float(np.mean(np.abs(1.0 / (1.0 + errors) - 1.0)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Roofline:
    """A constant for each group on the roofline of a device."""

    prior: DevicePrior
    log_factor: Mapping[str, float]
    half_width_frac: Mapping[str, float]

    def predict(self, name: str, batch: ShapeBatch) -> Prediction:
        """The times of a batch of one group."""
        log_time = roofline_log_s(batch, self.prior) + self.log_factor[name]
        return around(log_time, self.half_width_frac[name])


class ConstantEfficiency:
    """One efficiency a group."""

    def fit(self, groups: Mapping[str, Timed], *, device: str) -> Roofline:
        """Medians of measured time over the roofline."""
        prior = device_prior(device)
        ratios = {
            name: np.log(timed.time_s) - roofline_log_s(timed.batch, prior)
            for name, timed in groups.items()
        }
        return Roofline(
            prior=prior,
            log_factor={name: float(np.median(found)) for name, found in ratios.items()},
            half_width_frac={
                name: conformal_frac(np.expm1(median_left_out(found)))
                for name, found in ratios.items()
            },
        )

    def transfer(self, source: Roofline, *, device: str, probes: Mapping[str, Timed]) -> Roofline:
        """The same efficiencies on the other roofline."""
        del probes
        return replace(source, prior=device_prior(device))


def roofline_log_s(batch: ShapeBatch, prior: DevicePrior) -> Vector:
    """Log seconds at the rates of the data sheet: FLOP or bytes, whichever takes longer."""
    _, flop, nbytes = columns(batch).totals().T
    peaks = [prior.peaks_for(int(n)) for n in batch.element_nbytes]
    flop_s = flop / np.array([p.flop_per_s for p in peaks])
    return np.log(np.maximum(flop_s, nbytes / np.array([p.bytes_per_s for p in peaks])))


def median_left_out(values: Vector) -> Vector:
    """Each value less the median of all others; nothing where there are no others.

    >>> median_left_out(np.array([1.0, 2.0, 4.0, 8.0])).tolist()
    [-3.0, -2.0, 2.0, 6.0]
    """
    if len(values) < 2:
        return np.empty(0)
    ordered, rank = np.sort(values), np.arange(len(values))
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    return ordered - (ordered[low + (rank <= low)] + ordered[high + (rank <= high)]) / 2


def with_prior(without: str) -> Method:
    """The package's own models, from what public tables but this one say of the device."""
    return OwnModels(partial(fit_machine, use_prior=True, without=(without,)))
