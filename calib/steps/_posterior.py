"""Posterior of the constants given measured steps, and the residuals that they do not explain.

Similar layouts have similar residuals: a Gaussian process over layouts in addition to the constants
(Kennedy & O'Hagan 2001, "Bayesian calibration of computer models", section 4, the discrepancy of a
model). Its correlation falls with the distance, so a layout far from all measured ones has a wider
interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..regressors.robust import robust_minimum
from ..timeline.evaluation import step_times
from ..timeline.items import Floats
from ..workload.config import RunConfig
from ..workload.layout_table import FIELDS, Column, LayoutTable
from ._layouts import Layouts
from ._priced_items import Constant
from .known_steps import (
    DEGREES,
    SHARED_FRAC,
    KnownStep,
    correlations,
    measured_places,
    same_layout,
    similarity,
)

MODEL_SIGMA_LOG = 0.055
"""Deviation of a layout from the constants' prediction, before any step is known."""
SITE_SIGMA_LOG = 0.08
"""Deviation between the levels of two clusters, releases or days of one kind of machine."""
LEVEL_SIGMA_LOG = 10.0
"""Deviation of the level that all layouts of a run share: so wide that it absorbs everything that
they have in common, and leaves their ratios to the model."""
SLOPE_STEP = 1e-4
"""Change of a constant for finite differences."""
_DISCREPANCY_SPREADS_LOG, _MOST_SPREADS, _NUM_DISCREPANCIES = (0.3, 1.0), 4, 53
"""Prior deviations of the discrepancy's log below and above its usual value, the number of
deviations on the grid, and the number of grid values. Large misses are evidence; a good fit of few
layouts may be chance, with as many constants to fit them."""
_WIDE_SPREADS, _WIDE_STEPS = 2.0, 4
"""Prior deviations over which each constant is moved for wide slopes, and the number of steps along
them before exact slopes decide."""
_WEIGHT = 5.0
"""Residuals that the prior of a deviation is worth."""
_WILD_FRAC, _WILD_TIMES = 0.02, 4.0
"""Share of steps that are outliers for reasons of their own (a bad node, another setting, a slip),
and the factor on their scatter: 1 to 10 % of routine measurements are gross errors (Hampel et al.
1986, "Robust Statistics", section 1.2c), and of published steps rather few."""
_FEWEST_TO_DOUBT, _WILD_ROUNDS = 3, 8
"""Steps needed to detect outliers (of two that disagree either may be wrong), and iterations of the
weights."""
LEVEL: Constant = ("level", "of the run")
At = Callable[[Floats], tuple[Floats, Floats]]
"""Function from constants to log times of the measured layouts and their derivatives."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutPosterior:
    """Posterior of the constants given measured steps."""

    constants: tuple[Constant, ...]
    theta: Floats
    """Logs of the constants, relative to the centres of their priors."""
    root: Floats
    """Lower triangular root of their covariance."""
    known: tuple[RunConfig, ...]
    """Layouts of the measured steps."""
    weights: Floats
    """Inverse of the covariance of the residuals from the constants, shape (steps, steps)."""
    residuals: Floats
    """Logs of measured over modelled steps."""
    slopes: Floats
    """Derivatives of the measured steps by the constants."""
    sigma_log: float
    """Deviation of a layout from the constants' prediction."""
    spread_factor: float
    """Factor by which errors of held-out layouts exceed the posterior's."""
    measured: Mapping[RunConfig, tuple[int, ...]]
    """Indices of the steps of each layout that was measured here."""

    def discrepancy_of(self, table: LayoutTable) -> tuple[Floats, Floats, Floats]:
        """Return the expected residuals of layouts: logs and deviations, shape (layouts,), and pull
        on each constant. That of a measured layout includes its own measurement."""
        measured = self._measured(table)
        firsts, places = table.distinct(("model", *DEGREES), measured.codes)
        correlation = similarity(table.take(firsts), self.known)
        for row, code in enumerate(measured.codes[firsts].tolist()):
            if steps := measured.values[code]:
                correlation[row, list(steps)] += (1.0 - SHARED_FRAC) / len(steps)
        logs, sigmas, pull = self._discrepancy(correlation)
        return logs[places], sigmas[places], pull[places]

    def _measured(self, table: LayoutTable) -> Column[tuple[int, ...]]:
        """Return the indices of each layout's own steps as a column."""
        degrees = np.stack([table.numbers(name) for name in DEGREES], axis=1)
        known = LayoutTable.of(self.known)
        others = np.stack([known.numbers(name) for name in DEGREES], axis=1)
        # Few layouts have the degrees of a measured one, and looking up each costs more.
        near = np.flatnonzero((degrees[:, np.newaxis] == others).all(axis=2).any(axis=1))
        codes = np.zeros(len(table), dtype=np.int64)
        of_near = table.take(near).coded(self.places, FIELDS)
        values = ((), *of_near.values)
        codes[near] = 1 + of_near.codes
        return Column(values=values, codes=codes)

    def sigma_of(self, constant: Constant) -> float:
        """Return the deviation of a constant's log."""
        return float(np.linalg.norm(self.root[self.constants.index(constant)]))

    def places(self, config: RunConfig) -> tuple[int, ...]:
        """Return the indices of the steps of a layout that were measured here."""
        return self.measured.get(same_layout(config), ())

    def _discrepancy(self, correlation: Floats) -> tuple[Floats, Floats, Floats]:
        """Return logs, deviations and pull; the run's free level, if any, is included in the logs
        and the pull."""
        shared = self.sigma_log**2 * correlation
        # Unlike products of BLAS, these do not depend on how many rows there are.
        weighed = np.einsum("ck,kj->cj", shared, self.weights)
        variance = self.sigma_log**2 - np.einsum("ck,ck->c", weighed, shared)
        logs = np.einsum("ck,k->c", weighed, self.residuals)
        pull = np.einsum("ck,kj->cj", weighed, self.slopes)
        if LEVEL in self.constants:
            place = self.constants.index(LEVEL)
            logs, pull[:, place] = logs + self.theta[place], pull[:, place] - 1.0
        return logs, np.sqrt(np.maximum(variance, 0.0)), pull


def posterior_of(
    layouts: Layouts, known: Sequence[KnownStep], *, is_level_free: bool = False
) -> LayoutPosterior:
    """Fit the maximum posterior of the constants, given measured steps.

    ``layouts`` are those of ``known``, one for one and in their order. With ``is_level_free`` the
    steps of all layouts share an unknown factor with a flat prior.
    """
    evidence = _Evidence.of(layouts, known, is_level_free=is_level_free)
    at = evidence.memoized_at()
    mode = _likeliest_mode(evidence, at, evidence.covariance(MODEL_SIGMA_LOG))
    sigma = _discrepancy_sigma(evidence, mode)
    _, extra_variance = _outlier_weights(*_marginal(evidence, mode, sigma))
    noise = evidence.covariance(sigma) + np.diag(extra_variance)
    mode = _mode(evidence, at, mode.theta, noise)
    return LayoutPosterior(
        constants=evidence.constants,
        theta=mode.theta,
        root=np.linalg.cholesky(mode.covariance).astype(np.float64),
        known=tuple(one.config for one in known),
        weights=np.linalg.inv(noise).astype(np.float64),
        residuals=mode.residuals,
        slopes=mode.slopes,
        sigma_log=sigma,
        spread_factor=_spread_factor(evidence, mode, sigma),
        measured=measured_places(known),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Mode:
    """The maximum posterior and its neighbourhood."""

    theta: Floats
    cost: float
    """Sum of squares of the standardised residuals and constants."""
    residuals: Floats
    """Measured minus modelled log times, shape (rows,)."""
    slopes: Floats
    """Derivatives of log times by the constants, shape (rows, constants)."""
    covariance: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Evidence:
    """Measured steps as a function of the constants and of the level of each site."""

    layouts: Layouts
    measured_log: Floats
    levels: tuple[tuple[Constant, float], ...]
    """Constants of each site, and of the run's level if it is free, with their deviations."""
    is_at: Floats
    """1 for the levels that each step has, shape (rows, levels)."""
    measurement_sigma: Floats
    """Deviation of each step's measurement."""
    alike: Floats
    """Correlations of the residuals from the constants, shape (rows, rows)."""

    @staticmethod
    def of(layouts: Layouts, known: Sequence[KnownStep], *, is_level_free: bool) -> _Evidence:
        sites = tuple(sorted({one.site for one in known if one.site}))
        is_at = np.array([[float(one.site == site) for site in sites] for one in known])
        levels: list[tuple[Constant, float]] = [(("site", site), SITE_SIGMA_LOG) for site in sites]
        is_at = is_at.reshape(len(known), len(sites))
        if is_level_free:
            levels.append((LEVEL, LEVEL_SIGMA_LOG))
            is_at = np.hstack([is_at, np.ones((len(known), 1))])
        return _Evidence(
            layouts=layouts,
            measured_log=np.log([one.time_s for one in known]),
            levels=tuple(levels),
            is_at=is_at,
            measurement_sigma=np.array([one.sigma_log for one in known]),
            alike=correlations([one.config for one in known]),
        )

    @property
    def constants(self) -> tuple[Constant, ...]:
        return (*self.layouts.constants, *(constant for constant, _ in self.levels))

    @property
    def sigma_log(self) -> Floats:
        return np.concatenate([self.layouts.sigma_log, [sigma for _, sigma in self.levels]])

    def covariance(self, sigma: float) -> Floats:
        """Return the covariance of the steps given the constants, shape (rows, rows)."""
        return sigma**2 * self.alike + np.diag(self.measurement_sigma**2)

    def at(self, theta: Floats, *, is_wide: bool = False) -> tuple[Floats, Floats]:
        """Return log times and their derivatives: both cost hardly more than either.

        With ``is_wide`` the derivatives are means over two prior deviations upwards.
        """
        number = len(self.layouts.constants)
        wide = _WIDE_SPREADS * self.layouts.sigma_log if is_wide else None
        groups, slopes = self.layouts.slopes(theta[:number], SLOPE_STEP, global_steps=wide)
        logs = np.log(step_times(self.layouts.compiled, groups)[:, 0])
        logs += self.layouts.growth_log(theta[:number, np.newaxis])[:, 0]
        return logs + self.is_at @ theta[number:], np.hstack([slopes, self.is_at])

    def memoized_at(self, *, is_wide: bool = False) -> At:
        """Return ``at`` with the result of the last point cached."""
        newest: dict[bytes, tuple[Floats, Floats]] = {}

        def at(theta: Floats) -> tuple[Floats, Floats]:
            key = theta.tobytes()
            if key not in newest:
                newest.clear()
                newest[key] = self.at(theta, is_wide=is_wide)
            return newest[key]

        return at


def _likeliest_mode(evidence: _Evidence, at: At, noise: Floats) -> _Mode:
    """Return the likelier mode of two starts: the priors' centres, and where wide slopes lead.

    A cost that another hides at the centres has no slope there, and would never appear.
    """
    centre, wide_at = np.zeros(len(evidence.constants)), evidence.memoized_at(is_wide=True)
    far = _mode(evidence, wide_at, centre, noise, most_steps=_WIDE_STEPS)
    modes = [_mode(evidence, at, start, noise) for start in (centre, far.theta)]
    return min(modes, key=lambda mode: mode.cost)


def _mode(
    evidence: _Evidence, at: At, start: Floats, noise: Floats, *, most_steps: int = 20
) -> _Mode:
    spread, measured = evidence.sigma_log, evidence.measured_log
    whiten = np.linalg.inv(np.linalg.cholesky(noise))

    def residuals(theta: Floats) -> Floats:
        return np.concatenate([whiten @ (at(theta)[0] - measured), theta / spread])

    def jacobian(theta: Floats) -> Floats:
        return np.vstack([whiten @ at(theta)[1], np.diag(1 / spread)])

    theta = robust_minimum(
        residuals,
        jacobian,
        start,
        spread=spread,
        loss="linear",
        tolerance=1e-5,
        most_steps=most_steps,
    )
    log_time, slopes = at(theta)
    scaled = whiten @ slopes
    covariance = np.linalg.inv(scaled.T @ scaled + np.diag(spread**-2))
    misses = residuals(theta)
    return _Mode(
        theta=theta,
        cost=float(misses @ misses),
        residuals=measured - log_time,
        slopes=slopes,
        covariance=0.5 * (covariance + covariance.T),
    )


def _marginal(evidence: _Evidence, mode: _Mode, sigma: float) -> tuple[Floats, Floats]:
    """Return the linearised prior covariance of the measured steps, and their deviations from the
    prior."""
    wide = mode.slopes * evidence.sigma_log
    return evidence.covariance(sigma) + wide @ wide.T, mode.residuals + mode.slopes @ mode.theta


def _discrepancy_sigma(evidence: _Evidence, mode: _Mode) -> float:
    """Return the likeliest deviation of layouts from the constants (MacKay 1992, section 4, with a
    prior of two half normals of the log).

    At each value some steps may be outliers, at the cost of their odds: a single distant step is
    more likely an outlier, many distant steps more likely a wider deviation.
    """
    lower, upper = _DISCREPANCY_SPREADS_LOG
    apart = _MOST_SPREADS * np.linspace(-lower, upper, _NUM_DISCREPANCIES)
    logs = np.log(MODEL_SIGMA_LOG) + apart
    priors = (apart / np.where(apart < 0, lower, upper)) ** 2
    scores = []
    for log, prior in zip(logs, priors, strict=True):
        covariance, off = _marginal(evidence, mode, float(np.exp(log)))
        is_wild, extra_variance = _outlier_weights(covariance, off)
        root = np.linalg.cholesky(covariance + np.diag(extra_variance))
        white = np.linalg.solve(root, off)
        odds = is_wild.sum() * np.log(_WILD_FRAC / (1.0 - _WILD_FRAC))
        scores.append(odds - 0.5 * (white @ white + prior) - np.sum(np.log(np.diag(root))))
    return float(np.exp(_peak(logs, np.array(scores))))


def _peak(places: Floats, scores: Floats) -> float:
    """Return the maximum of a curve, by the parabola through its highest point and both
    neighbours."""
    best = int(np.clip(np.argmax(scores), 1, len(scores) - 2))
    near = slice(best - 1, best + 2)
    curve, slope, _ = np.polyfit(places[near] - places[best], scores[near], 2)
    step = float(-slope / (2.0 * curve)) if curve < 0 else 0.0
    return float(places[best] + np.clip(step, *(places[near] - places[best])[[0, 2]]))


def _outlier_weights(covariance: Floats, off: Floats) -> tuple[Floats, Floats]:
    """Return each step's probability of being an outlier among the others, and its additional
    variance, shape (rows,) each.

    Steps scatter as a mixture of two normals (Tukey 1960, "A survey of sampling from contaminated
    distributions"), whose weights follow iteratively from held-out residuals.
    """
    is_wild, extra_variance = np.zeros(len(off)), np.zeros(len(off))
    for _ in range(_WILD_ROUNDS if len(off) >= _FEWEST_TO_DOUBT else 0):
        inverse = np.linalg.inv(covariance + np.diag(extra_variance))
        variance = 1.0 / np.diag(inverse)
        usual = variance - extra_variance
        squares = (inverse @ off * variance) ** 2 / usual
        odds_log = 0.5 * squares * (1.0 - _WILD_TIMES**-2)
        odds_log += np.log(_WILD_FRAC / (1.0 - _WILD_FRAC) / _WILD_TIMES)
        is_wild = 1.0 / (1.0 + np.exp(-np.minimum(odds_log, 500.0)))
        extra_variance = usual * (1.0 / (1.0 - is_wild * (1.0 - _WILD_TIMES**-2)) - 1.0)
    if is_wild.sum() > 0.5 * len(off):  # then the model is off, not the steps
        return np.zeros(len(off)), np.zeros(len(off))
    return is_wild, extra_variance


def _spread_factor(evidence: _Evidence, mode: _Mode, sigma: float) -> float:
    """Return the deviation of standardised leave-one-out residuals, shrunk to 1 as by ``_WEIGHT``
    residuals.

    With row i held out, its error is [C^-1 d]_i / [C^-1]_ii with the variance 1 / [C^-1]_ii, where
    d are the steps' deviations from the prior (Rasmussen & Williams 2006, section 5.4.2).
    """
    covariance, off = _marginal(evidence, mode, sigma)
    inverse = np.linalg.inv(covariance)
    squares = (inverse @ off) ** 2 / np.diag(inverse)
    number = len(squares) - (LEVEL in evidence.constants)  # a free level uses up one of them
    return float(np.sqrt((_WEIGHT + np.sum(squares)) / (_WEIGHT + number)))
