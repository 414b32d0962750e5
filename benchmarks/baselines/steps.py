"""What a step model has to beat: a constant FLOP rate, a trivial order, ten analytical terms, and
scaling out without a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.benchmarks.baselines.step_terms import NUM_TERMS, step_flop, step_terms
from forerun.calib.fit import device_prior
from forerun.calib.records import StepPredictions, StepRow
from forerun.calib.regressors import Z_90, robust_minimum, shrunk_sigma_log
from forerun.calib.validation import RANK_FIGURES
from forerun.calib.workload import RunConfig

Array = NDArray[np.float64]
LogWork = Callable[[Sequence[StepRow]], Array]
"""Log of the seconds that the data sheet's rate would take, ``(rows,)``."""
_PRIOR_RATE_FRAC = 0.4
"""Share of the data sheet that a step reaches before any was seen."""
_RATE_SIGMA_LOG = 0.3
TERM_SIGMA_LOG = 0.7
"""How far the scale of a term may lie from its prior."""
_NOISE_SIGMA_LOG = 0.06
_MODEL_SIGMA_LOG = 0.1
_MOST = 10_000
"""Above every pp and micro-batch size."""


class ConstantRate:
    """FLOP over one rate per device, stretched by the bubble of the pipeline."""

    name = "constant rate"

    def fit(self, rows: Sequence[StepRow]) -> FittedLevel:
        """The median rate of the rows."""
        return _fitted_level(rows, _log_work)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLevel:
    """One constant: log of step time over that of the work at the data sheet's rate."""

    log_work: LogWork
    level_log: float
    sigma_log: float

    def predict(self, rows: Sequence[StepRow]) -> StepPredictions:
        """Times and intervals."""
        sigma = np.full(len(rows), self.sigma_log)
        return _predictions(self.log_work(rows) + self.level_log, sigma)


class TrivialOrder:
    """Smallest tp first, then smallest pp, then largest micro-batch: an order, no times."""

    name = "trivial rule"
    orders_only = True

    def fit(self, rows: Sequence[StepRow]) -> TrivialOrder:
        """Nothing is learned."""
        return self

    def predict(self, rows: Sequence[StepRow]) -> StepPredictions:
        """Numbers that say the order alone, comparable between calls."""
        configs = [row.config for row in rows]
        pairs = [(c.parallelism, _MOST - c.batch.micro_batch_size) for c in configs]
        order = np.array([(p.tp * _MOST + p.pp) * _MOST + rest for p, rest in pairs], dtype=float)
        return StepPredictions(time_s=order, low_s=order, high_s=order)


class TenTerms:
    """Ten physical terms with a scale each, fitted to log times by MAP under wide priors.

    Terms: ``step_terms``.  The scales have log-normal priors around what data sheets promise, so
    that few rows, or none, still give an answer.
    """

    name = "ten-term analytical"

    def fit(self, rows: Sequence[StepRow]) -> FittedTerms:
        """The scales at the maximum of the posterior, and their covariance (Laplace)."""
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
        found = robust_minimum(residuals, slopes, np.zeros(NUM_TERMS), spread=spread, loss="linear")
        jacobian = slopes(found)
        covariance = np.linalg.inv(jacobian.T @ jacobian)
        count = len(rows)
        leverage = np.einsum("ij,jk,ik->i", jacobian, covariance, jacobian)[:count]
        left_out = residuals(found)[:count] * _NOISE_SIGMA_LOG / (1 - np.minimum(leverage, 0.95))
        sigma = shrunk_sigma_log(left_out, prior_sigma_log=_MODEL_SIGMA_LOG)
        return FittedTerms(scales_log=found, covariance=covariance, sigma_log=sigma)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedTerms:
    """Scales of the terms and how sure they are."""

    scales_log: Array
    covariance: Array
    sigma_log: float
    """Deviation of what the terms leave out."""

    def predict(self, rows: Sequence[StepRow]) -> StepPredictions:
        """Times and intervals."""
        terms = _terms(rows)
        shares = _shares(terms, self.scales_log)
        variance = np.einsum("ij,jk,ik->i", shares, self.covariance, shares)
        return _predictions(
            _log_time(terms, self.scales_log), np.sqrt(variance + self.sigma_log**2)
        )


class PerfectScaling:
    """Step times go with the FLOP of each device, from the smallest scale that is known.

    Whatever the bubble or the collectives: the efficiency of that scale is kept.
    """

    name = "perfect scaling"

    def fit(self, rows: Sequence[StepRow]) -> FittedLevel:
        """The median rate of the rows on the fewest devices."""
        least = min((row.num_ranks for row in rows), default=0)
        return _fitted_level([row for row in rows if row.num_ranks == least], _log_ideal)


BASELINES = (ConstantRate(), TrivialOrder(), TenTerms(), PerfectScaling())


def order_only(result: dict[str, Any]) -> dict[str, Any]:
    """The result of a model that only orders: all that speaks of times is None."""
    kept = {"table", "protocol", "group", "n", *RANK_FIGURES}
    return {name: value if name in kept else None for name, value in result.items()}


def _fitted_level(rows: Sequence[StepRow], log_work: LogWork) -> FittedLevel:
    logs = np.log([row.measured_s for row in rows]) - log_work(rows)
    level = float(np.median(logs)) if len(rows) else -np.log(_PRIOR_RATE_FRAC)
    others = range(len(rows) if len(rows) > 1 else 0)
    left_out = [float(logs[i] - np.median(np.delete(logs, i))) for i in others]
    sigma = shrunk_sigma_log(np.array(left_out), prior_sigma_log=_RATE_SIGMA_LOG)
    return FittedLevel(log_work=log_work, level_log=level, sigma_log=sigma)


def _predictions(log_time: Array, sigma_log: Array) -> StepPredictions:
    half = Z_90 * sigma_log
    return StepPredictions(
        time_s=np.exp(log_time), low_s=np.exp(log_time - half), high_s=np.exp(log_time + half)
    )


def _log_work(rows: Sequence[StepRow]) -> Array:
    """Log of the time at the data sheet's rate with the bubble, ``(rows,)``."""
    return _log_ideal(rows) + np.log([1 + row.config.bubble_frac for row in rows])


def _log_ideal(rows: Sequence[StepRow]) -> Array:
    """The same without the bubble."""
    return np.array([np.log(_ideal_s(row.config)) for row in rows], dtype=np.float64)


def _ideal_s(config: RunConfig) -> float:
    nbytes = 1 if config.fp8.value != "none" else config.precision.nbytes
    peak = device_prior(config.device).peaks_for(nbytes).flop_per_s
    return step_flop(config) / (peak * config.parallelism.num_ranks)


def _terms(rows: Sequence[StepRow]) -> Array:
    found = [step_terms(row.config) for row in rows]
    return np.array(found, dtype=np.float64).reshape(len(rows), NUM_TERMS)


def _log_time(terms: Array, scales_log: Array) -> Array:
    return np.log(terms @ np.exp(scales_log))


def _shares(terms: Array, scales_log: Array) -> Array:
    """Share of each term in the time, ``(rows, terms)``: the slope of its log."""
    parts = terms * np.exp(scales_log)
    return parts / parts.sum(axis=1, keepdims=True)
