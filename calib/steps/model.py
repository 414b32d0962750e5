"""A step model calibrated by the step times of a few layouts, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from ..fit.robust import robust_minimum
from ..samples.step_rows import StepPredictions, StepRow
from ..timeline.items import Floats
from .base_times import BaseTimes
from .layouts import EFFECTS, Effect, Layouts, effects_of, layouts_of

Base = Callable[[StepRow], BaseTimes]
_MEASURED_SIGMA_LOG = 0.01
MODEL_SIGMA_LOG = 0.02
"""Error on a layout that no constant explains."""
_WEIGHT = 5.0
"""Residuals that the prior of a deviation counts for."""
_MAX_ROUNDS, _GROWTH = 3, 1.2
_WIDEST = 2.0
_FREEDOM = 10.0
_STEP = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepScales:
    """What ``fit`` starts from: base times of the machine and the priors of its constants."""

    base: Base
    measured_sigma_log: float = _MEASURED_SIGMA_LOG

    def fit(self, rows: Sequence[StepRow]) -> FittedScales:
        """Constants at the greatest posterior; without rows the priors."""
        if not rows:
            return FittedScales(
                start=self,
                effects=(),
                theta=None,
                covariance=None,
                sigma_log=self.measured_sigma_log,
                spread_factor=1.0,
            )
        effects = tuple(dict.fromkeys(effect for row in rows for effect in effects_of(row)))
        layouts = layouts_of(rows, self.base(rows[0]), effects)
        measured = np.log([row.measured_s for row in rows])
        sigma = self.measured_sigma_log
        found = _mode(layouts, measured, prior(layouts)[0], sigma)
        for _ in range(_MAX_ROUNDS):
            wider = self._noise(found)
            if wider < _GROWTH * sigma:
                break
            sigma = wider
            found = _mode(layouts, measured, found.theta, sigma)
        return FittedScales(
            start=self,
            effects=effects,
            theta=found.theta,
            covariance=found.covariance,
            sigma_log=sigma,
            spread_factor=_spread_factor(found.residuals / sigma, found.leverage),
        )

    def _noise(self, found: _Mode) -> float:
        """Deviation of the residuals over the degrees of freedom that the constants leave.

        MacKay 1992, "Bayesian interpolation", section 4; never below what is known of measurements.
        """
        freedom = _WEIGHT + len(found.residuals) - float(np.sum(found.leverage))
        total = _WEIGHT * self.measured_sigma_log**2 + float(np.sum(found.residuals**2))
        return max(self.measured_sigma_log, float(np.sqrt(total / freedom)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedScales:
    """Constants of one machine, and how well they are known."""

    start: StepScales
    effects: tuple[Effect, ...]
    theta: Floats | None
    covariance: Floats | None
    sigma_log: float
    """Noise of a step time, and what of it the constants cannot follow."""
    spread_factor: float
    """How much wider errors of left-out rows are than the posterior says."""

    def predict(self, rows: Sequence[StepRow]) -> StepPredictions:
        """Medians and 90 % intervals."""
        asked = dict.fromkeys([*self.effects, *(e for row in rows for e in effects_of(row))])
        layouts = layouts_of(rows, self.start.base(rows[0]), tuple(asked))
        center, spread = prior(layouts)
        covariance = np.diag(spread**2)
        if self.theta is not None and self.covariance is not None:
            known = len(self.theta)
            center[:known] = self.theta
            covariance[:known, :known] = self.covariance
        found, slopes = gradient(layouts, center)
        variance = np.einsum("ri,ij,rj->r", slopes, covariance, slopes)
        sigma = np.sqrt(variance + self.sigma_log**2 + MODEL_SIGMA_LOG**2)
        half = student.ppf(0.95, _FREEDOM) * self.spread_factor * sigma
        return StepPredictions(
            time_s=np.exp(found), low_s=np.exp(found - half), high_s=np.exp(found + half)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Mode:
    """The greatest posterior and its neighbourhood."""

    theta: Floats
    residuals: Floats
    """Measured minus found log times, shape (rows,)."""
    covariance: Floats
    leverage: Floats
    """How far each row draws its own prediction, 0 to 1, shape (rows,)."""


def _mode(layouts: Layouts, measured: Floats, start: Floats, sigma: float) -> _Mode:
    center, spread = prior(layouts)

    def residuals(theta: Floats) -> Floats:
        found = layouts.log_time(theta[:, np.newaxis])[:, 0]
        return np.concatenate([(found - measured) / sigma, (theta - center) / spread])

    def jacobian(theta: Floats) -> Floats:
        return np.vstack([gradient(layouts, theta)[1] / sigma, np.diag(1 / spread)])

    theta = robust_minimum(
        residuals, jacobian, start, spread=spread, loss="linear", tolerance=1e-5, most_steps=20
    )
    found, slopes = gradient(layouts, theta)
    covariance = np.linalg.inv(slopes.T @ slopes / sigma**2 + np.diag(spread**-2))
    return _Mode(
        theta=theta,
        residuals=measured - found,
        covariance=covariance,
        leverage=np.einsum("ri,ij,rj->r", slopes, covariance, slopes) / sigma**2,
    )


def prior(layouts: Layouts) -> tuple[Floats, Floats]:
    """Centres and deviations of all constants."""
    center = [*(scale.log_center for scale in layouts.scales), *(0.0 for _ in layouts.effects)]
    spread = [
        *(scale.log_sigma for scale in layouts.scales),
        *(EFFECTS[effect[0]] for effect in layouts.effects),
    ]
    return np.array(center), np.array(spread)


def gradient(layouts: Layouts, theta: Floats) -> tuple[Floats, Floats]:
    """Log step times and their slopes, shapes (rows,) and (rows, constants)."""
    columns = np.column_stack([theta, theta[:, np.newaxis] + _STEP * np.eye(len(theta))])
    found = layouts.log_time(columns)
    return found[:, 0], (found[:, 1:] - found[:, :1]) / _STEP


def _spread_factor(residuals: Floats, leverage: Floats) -> float:
    """Deviation of standardised leave-one-out residuals, drawn to 1 as by so many residuals.

    Without row i its error has the variance sigma^2 / (1 - h_i), and the residual is
    r_i / (1 - h_i).
    """
    squares = residuals**2 / np.maximum(1 - leverage, 0.01)
    return min(_WIDEST, float(np.sqrt((_WEIGHT + np.sum(squares)) / (_WEIGHT + len(squares)))))
