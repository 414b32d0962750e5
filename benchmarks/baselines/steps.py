"""Baselines for the step model: constant FLOP rate, ten terms, perfect scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.benchmarks.baselines.step_terms import NUM_TERMS, step_flop, step_terms
from forerun.calib.fit.priors import device_prior
from forerun.calib.records.step_rows import StepPredictions, StepRow
from forerun.calib.regressors.robust import Z_90, robust_minimum, shrunk_sigma_log
from forerun.calib.workload.config import RunConfig

Array = NDArray[np.float64]
LogWork = Callable[[Sequence[StepRow]], Array]
"""Return type: log seconds of the work at data-sheet rates, shape ``(rows,)``."""
_PRIOR_RATE_FRAC = 0.4
"""Fraction of data-sheet FLOP/s that a step reaches, as a prior."""
_RATE_SIGMA_LOG = 0.3
TERM_SIGMA_LOG = 0.7
"""Prior standard deviation of a term's log scale."""
_NOISE_SIGMA_LOG = 0.06
_MODEL_SIGMA_LOG = 0.1


class ConstantRate:
    """FLOP over one rate per device, extended by the pipeline's bubble."""

    name = "constant rate"

    def fit(self, rows: Sequence[StepRow]) -> FittedLevel:
        """Fit the median rate of the rows."""
        return _fitted_level(rows, _log_work)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLevel:
    """One constant: log of step time over the time of the work at data-sheet rates."""

    log_work: LogWork
    level_log: float
    sigma_log: float

    def predict(self, rows: Sequence[StepRow]) -> StepPredictions:
        """Return times and intervals."""
        sigma = np.full(len(rows), self.sigma_log)
        return _predictions(self.log_work(rows) + self.level_log, sigma)


class TenTerms:
    """Ten physical terms with one scale each, fitted to log times by MAP under wide priors.

    The terms are those of ``step_terms``.  Scales have log-normal priors around data-sheet rates,
    so that few rows, or none, still give an answer.
    """

    name = "ten-term analytical"

    def fit(self, rows: Sequence[StepRow]) -> FittedTerms:
        """Return the scales at the posterior's maximum, and their covariance (Laplace)."""
        terms = _terms(rows)
        logs = np.log([row.measured_s for row in rows])

        def residuals(scales: Array) -> Array:
            return np.concatenate(
                [(_log_time(terms, scales) - logs) / _NOISE_SIGMA_LOG, scales / TERM_SIGMA_LOG]
            )

        def slopes(scales: Array) -> Array:
            return np.vstack(
                [_shares(terms, scales) / _NOISE_SIGMA_LOG, np.eye(NUM_TERMS) / TERM_SIGMA_LOG]
            )

        spread = np.broadcast_to(np.asarray(TERM_SIGMA_LOG, dtype=np.float64), NUM_TERMS)
        scales_log = robust_minimum(
            residuals, slopes, np.zeros(NUM_TERMS), spread=spread, loss="linear"
        )
        jacobian = slopes(scales_log)
        covariance = np.linalg.inv(jacobian.T @ jacobian)
        count = len(rows)
        leverage = np.einsum("ij,jk,ik->i", jacobian, covariance, jacobian)[:count]
        loo_residuals = (
            residuals(scales_log)[:count] * _NOISE_SIGMA_LOG / (1 - np.minimum(leverage, 0.95))
        )
        sigma = shrunk_sigma_log(loo_residuals, prior_sigma_log=_MODEL_SIGMA_LOG)
        return FittedTerms(scales_log=scales_log, covariance=covariance, sigma_log=sigma)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedTerms:
    """Scales of the terms and their uncertainty."""

    scales_log: Array
    covariance: Array
    sigma_log: float
    """Standard deviation of effects that the terms do not model."""

    def predict(self, rows: Sequence[StepRow]) -> StepPredictions:
        """Return times and intervals."""
        terms = _terms(rows)
        shares = _shares(terms, self.scales_log)
        variance = np.einsum("ij,jk,ik->i", shares, self.covariance, shares)
        return _predictions(
            _log_time(terms, self.scales_log), np.sqrt(variance + self.sigma_log**2)
        )


class PerfectScaling:
    """Step times proportional to the FLOP of each device, from the smallest known scale.

    The efficiency at that scale is assumed to stay, regardless of bubble and collectives.
    """

    name = "perfect scaling"

    def fit(self, rows: Sequence[StepRow]) -> FittedLevel:
        """Fit the median rate of the rows on the fewest devices."""
        least = min((row.num_ranks for row in rows), default=0)
        return _fitted_level([row for row in rows if row.num_ranks == least], _log_ideal)


BASELINES = (ConstantRate(), TenTerms(), PerfectScaling())


def _fitted_level(rows: Sequence[StepRow], log_work: LogWork) -> FittedLevel:
    logs = np.log([row.measured_s for row in rows]) - log_work(rows)
    level = float(np.median(logs)) if len(rows) else -np.log(_PRIOR_RATE_FRAC)
    others = range(len(rows) if len(rows) > 1 else 0)
    loo_residuals = [float(logs[i] - np.median(np.delete(logs, i))) for i in others]
    sigma = shrunk_sigma_log(np.array(loo_residuals), prior_sigma_log=_RATE_SIGMA_LOG)
    return FittedLevel(log_work=log_work, level_log=level, sigma_log=sigma)


def _predictions(log_time: Array, sigma_log: Array) -> StepPredictions:
    half = Z_90 * sigma_log
    return StepPredictions(
        time_s=np.exp(log_time), low_s=np.exp(log_time - half), high_s=np.exp(log_time + half)
    )


def _log_work(rows: Sequence[StepRow]) -> Array:
    """Return log time at data-sheet rates including the bubble, shape ``(rows,)``."""
    return _log_ideal(rows) + np.log([1 + row.config.bubble_frac for row in rows])


def _log_ideal(rows: Sequence[StepRow]) -> Array:
    """Return log time at data-sheet rates without the bubble, shape ``(rows,)``."""
    return np.array([np.log(_ideal_s(row.config)) for row in rows], dtype=np.float64)


def _ideal_s(config: RunConfig) -> float:
    nbytes = 1 if config.fp8.value != "none" else config.precision.nbytes
    peak = device_prior(config.device).peaks_for(nbytes).flop_per_s
    return step_flop(config) / (peak * config.parallelism.num_ranks)


def _terms(rows: Sequence[StepRow]) -> Array:
    terms = [step_terms(row.config) for row in rows]
    return np.array(terms, dtype=np.float64).reshape(len(rows), NUM_TERMS)


def _log_time(terms: Array, scales_log: Array) -> Array:
    return np.log(terms @ np.exp(scales_log))


def _shares(terms: Array, scales_log: Array) -> Array:
    """Return each term's share of the time, shape ``(rows, terms)``: the slope of its log."""
    parts = terms * np.exp(scales_log)
    return parts / parts.sum(axis=1, keepdims=True)
