"""What measured steps say of the constants, and what the constants leave of them.

What they leave is much the same for layouts that are alike: a Gaussian process over layouts beside
the constants (Kennedy & O'Hagan 2001, "Bayesian calibration of computer models", section 4, the
discrepancy of a model).  Its correlation falls with the distance, so a layout that is far from all
that was measured is known less well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..regressors import robust_minimum
from ..timeline import Floats, step_times
from ..workload import RunConfig
from .known import (
    SHARED_FRAC,
    KnownStep,
    alike,
    correlations,
    degrees_of,
    measured_places,
    same_layout,
    similarity,
)
from .layouts import Layouts
from .priced_items import Constant

MODEL_SIGMA_LOG = 0.055
"""How far a layout lies from what the constants say of it, before any step is known."""
SITE_SIGMA_LOG = 0.08
"""How far apart the levels of two clusters, releases or days of one kind of machine lie."""
LEVEL_SIGMA_LOG = 10.0
"""Deviation of the level that all layouts of a run share: so wide that it takes all that they have
in common, and leaves them as far apart as the model says."""
SLOPE_STEP = 1e-4
"""Change of a constant from which slopes are taken."""
_DISCREPANCY_SPREADS_LOG, _MOST_SPREADS, _NUM_DISCREPANCIES = (0.3, 1.0), 4, 53
"""Prior deviation of the log of that distance below and above what is usual, how many of them it
may be off, and how many values of it are weighed.  That layouts miss by much is evidence; that the
few which are known fit well may be chance, with as many constants to fit them."""
_WEIGHT = 5.0
"""Residuals that the prior of a deviation counts for."""
_WILD_FRAC, _WILD_TIMES = 0.02, 4.0
"""Share of steps that are off for reasons of their own (a bad node, another setting, a slip), and
how many times as far they scatter: 1 to 10 % of routine measurements are gross errors (Hampel et
al. 1986, "Robust Statistics", section 1.2c), and of steps that somebody publishes or keeps rather
few."""
_FEWEST_TO_DOUBT, _WILD_ROUNDS = 3, 8
"""Of two steps that disagree nobody can say which is off."""
LEVEL: Constant = ("level", "of the run")
At = Callable[[Floats], tuple[Floats, Floats]]
"""Log times of the measured layouts and their slopes, at constants."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutPosterior:
    """What measured steps say of the constants."""

    constants: tuple[Constant, ...]
    theta: Floats
    """Logs, from the centres of their priors."""
    root: Floats
    """Lower triangular root of their covariance."""
    known: tuple[RunConfig, ...]
    """Layouts of the measured steps."""
    weights: Floats
    """Inverse of the covariance of what the constants leave, shape (steps, steps)."""
    residuals: Floats
    """Measured over modelled steps, logs."""
    slopes: Floats
    """Of the measured steps by the constants."""
    sigma_log: float
    """How far a layout lies from what the constants say of it."""
    spread_factor: float
    """How much wider errors of left-out layouts are than the posterior says."""
    measured: Mapping[RunConfig, tuple[int, ...]]
    """Places of the steps of each layout that was measured here."""

    def discrepancy_of(self, configs: Sequence[RunConfig]) -> tuple[Floats, Floats, Floats]:
        """The same of layouts, of which those that were measured are their own measurement."""
        correlation = similarity(configs, self.known)
        degrees = {_degrees(config) for config in self.known}
        for row, config in enumerate(configs):
            if _degrees(config) in degrees:  # few are, and looking each up costs more
                held = self.places(config)
                correlation[row, list(held)] += (1.0 - SHARED_FRAC) / max(1, len(held))
        return self._discrepancy(correlation)

    def places(self, config: RunConfig) -> tuple[int, ...]:
        """The places of the steps of a layout that were measured here."""
        return self.measured.get(same_layout(config), ())

    def discrepancy(self, degrees: Floats) -> tuple[Floats, Floats, Floats]:
        """What layouts alike leave for these: logs, deviations, and pull on each constant."""
        return self._discrepancy(alike(degrees, degrees_of(self.known)))

    def _discrepancy(self, correlation: Floats) -> tuple[Floats, Floats, Floats]:
        """The level, where the run has one, is among the logs and in the pull."""
        shared = self.sigma_log**2 * correlation
        weighed = shared @ self.weights
        left = self.sigma_log**2 - np.einsum("ck,ck->c", weighed, shared)
        logs, pull = weighed @ self.residuals, weighed @ self.slopes
        if LEVEL in self.constants:
            place = self.constants.index(LEVEL)
            logs, pull[:, place] = logs + self.theta[place], pull[:, place] - 1.0
        return logs, np.sqrt(np.maximum(left, 0.0)), pull


def _degrees(config: RunConfig) -> tuple[int, ...]:
    """Equal for layouts that ``same_layout`` finds equal."""
    par = config.parallelism
    return (par.tp, par.pp, par.dp, par.cp, par.ep, config.batch.micro_batch_size)


def posterior_of(
    layouts: Layouts, known: Sequence[KnownStep], *, is_level_free: bool = False
) -> LayoutPosterior:
    """The greatest posterior of the constants, given steps that were measured.

    ``layouts`` are those of ``known``, one for one and in their order.  With ``is_level_free``
    the steps of all layouts are off by a factor that nothing is known of beforehand.
    """
    evidence = _Evidence.of(layouts, known, is_level_free=is_level_free)
    at = evidence.remembered()
    centre = np.zeros(len(evidence.constants))
    found = _mode(evidence, at, centre, evidence.covariance(MODEL_SIGMA_LOG))
    sigma = _discrepancy_sigma(evidence, found)
    _, beside = _wild(*_marginal(evidence, found, sigma))
    noise = evidence.covariance(sigma) + np.diag(beside)
    found = _mode(evidence, at, found.theta, noise)
    return LayoutPosterior(
        constants=evidence.constants,
        theta=found.theta,
        root=np.linalg.cholesky(found.covariance).astype(np.float64),
        known=tuple(one.config for one in known),
        weights=np.linalg.inv(noise).astype(np.float64),
        residuals=found.residuals,
        slopes=found.slopes,
        sigma_log=sigma,
        spread_factor=_spread_factor(evidence, found, sigma),
        measured=measured_places(known),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Mode:
    """The greatest posterior and its neighbourhood."""

    theta: Floats
    residuals: Floats
    """Measured minus found log times, shape (rows,)."""
    slopes: Floats
    """Of log times by the constants, shape (rows, constants)."""
    covariance: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Evidence:
    """Measured steps as a function of the constants and of the level of each site."""

    layouts: Layouts
    measured_log: Floats
    levels: tuple[tuple[Constant, float], ...]
    """Constants of each site, and of all steps where these have one, with their deviations."""
    is_at: Floats
    """Which levels each step has, shape (rows, levels)."""
    own_sigma: Floats
    """How well each step was measured."""
    alike: Floats
    """Correlations of what the constants leave, shape (rows, rows)."""

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
            own_sigma=np.array([one.sigma_log for one in known]),
            alike=correlations([one.config for one in known]),
        )

    @property
    def constants(self) -> tuple[Constant, ...]:
        return (*self.layouts.constants, *(constant for constant, _ in self.levels))

    @property
    def sigma_log(self) -> Floats:
        return np.concatenate([self.layouts.sigma_log, [sigma for _, sigma in self.levels]])

    def covariance(self, sigma: float) -> Floats:
        """Of the steps where the constants are known, shape (rows, rows)."""
        return sigma**2 * self.alike + np.diag(self.own_sigma**2)

    def at(self, theta: Floats) -> tuple[Floats, Floats]:
        """Log times and their slopes: both cost hardly more than either."""
        number = len(self.layouts.constants)
        found, slopes = self.layouts.slopes(theta[:number], SLOPE_STEP)
        logs = np.log(step_times(self.layouts.compiled, found)[:, 0])
        logs += self.layouts.growth_log(theta[:number, np.newaxis])[:, 0]
        return logs + self.is_at @ theta[number:], np.hstack([slopes, self.is_at])

    def remembered(self) -> At:
        """``at``, which answers for the last point again without working it out."""
        newest: dict[bytes, tuple[Floats, Floats]] = {}

        def at(theta: Floats) -> tuple[Floats, Floats]:
            key = theta.tobytes()
            if key not in newest:
                newest.clear()
                newest[key] = self.at(theta)
            return newest[key]

        return at


def _mode(evidence: _Evidence, at: At, start: Floats, noise: Floats) -> _Mode:
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
        most_steps=20,
    )
    log_time, slopes = at(theta)
    scaled = whiten @ slopes
    covariance = np.linalg.inv(scaled.T @ scaled + np.diag(spread**-2))
    return _Mode(
        theta=theta,
        residuals=measured - log_time,
        slopes=slopes,
        covariance=0.5 * (covariance + covariance.T),
    )


def _marginal(evidence: _Evidence, found: _Mode, sigma: float) -> tuple[Floats, Floats]:
    """Covariance of the measured steps before any is known, linearised, and what they were off."""
    wide = found.slopes * evidence.sigma_log
    return evidence.covariance(sigma) + wide @ wide.T, found.residuals + found.slopes @ found.theta


def _discrepancy_sigma(evidence: _Evidence, found: _Mode) -> float:
    """How far layouts lie from what the constants say: the likeliest (MacKay 1992, section 4, with
    a prior of two half normals of the log).

    At each value some steps may be wild, which costs their odds: one that is far off is cheaper
    wild than all others wider, and all that are off are cheaper wider.
    """
    lower, upper = _DISCREPANCY_SPREADS_LOG
    apart = _MOST_SPREADS * np.linspace(-lower, upper, _NUM_DISCREPANCIES)
    logs = np.log(MODEL_SIGMA_LOG) + apart
    priors = (apart / np.where(apart < 0, lower, upper)) ** 2
    scores = []
    for log, prior in zip(logs, priors, strict=True):
        covariance, off = _marginal(evidence, found, float(np.exp(log)))
        is_wild, beside = _wild(covariance, off)
        root = np.linalg.cholesky(covariance + np.diag(beside))
        white = np.linalg.solve(root, off)
        odds = is_wild.sum() * np.log(_WILD_FRAC / (1.0 - _WILD_FRAC))
        scores.append(odds - 0.5 * (white @ white + prior) - np.sum(np.log(np.diag(root))))
    return float(np.exp(_peak(logs, np.array(scores))))


def _peak(places: Floats, scores: Floats) -> float:
    """The greatest of a curve, by the parabola through the three highest neighbours."""
    best = int(np.clip(np.argmax(scores), 1, len(scores) - 2))
    near = slice(best - 1, best + 2)
    curve, slope, _ = np.polyfit(places[near] - places[best], scores[near], 2)
    step = float(-slope / (2.0 * curve)) if curve < 0 else 0.0
    return float(places[best] + np.clip(step, *(places[near] - places[best])[[0, 2]]))


def _wild(covariance: Floats, off: Floats) -> tuple[Floats, Floats]:
    """Which steps lie far from what all others say of them, as probabilities, and what such a step
    scatters beside, shape (rows,) each.

    Steps scatter as a mixture of two normals (Tukey 1960, "A survey of sampling from contaminated
    distributions"), whose weights follow from left-out residuals, round by round.
    """
    is_wild, beside = np.zeros(len(off)), np.zeros(len(off))
    for _ in range(_WILD_ROUNDS if len(off) >= _FEWEST_TO_DOUBT else 0):
        inverse = np.linalg.inv(covariance + np.diag(beside))
        variance = 1.0 / np.diag(inverse)
        usual = variance - beside
        squares = (inverse @ off * variance) ** 2 / usual
        odds_log = 0.5 * squares * (1.0 - _WILD_TIMES**-2)
        odds_log += np.log(_WILD_FRAC / (1.0 - _WILD_FRAC) / _WILD_TIMES)
        is_wild = 1.0 / (1.0 + np.exp(-np.minimum(odds_log, 500.0)))
        beside = usual * (1.0 / (1.0 - is_wild * (1.0 - _WILD_TIMES**-2)) - 1.0)
    if is_wild.sum() > 0.5 * len(off):  # then it is the model that is off
        return np.zeros(len(off)), np.zeros(len(off))
    return is_wild, beside


def _spread_factor(evidence: _Evidence, found: _Mode, sigma: float) -> float:
    """Deviation of standardised leave-one-out residuals, drawn to 1 as by so many residuals.

    Without row i its error is [C^-1 d]_i / [C^-1]_ii with the variance 1 / [C^-1]_ii, d what all
    steps were off before any was known (Rasmussen & Williams 2006, section 5.4.2).
    """
    covariance, off = _marginal(evidence, found, sigma)
    inverse = np.linalg.inv(covariance)
    squares = (inverse @ off) ** 2 / np.diag(inverse)
    number = len(squares) - (LEVEL in evidence.constants)  # a free level takes one of them whole
    return float(np.sqrt((_WEIGHT + np.sum(squares)) / (_WEIGHT + number)))
