"""Forecast of the remaining run as wall-clock time, with an interval.

The remaining time is a distribution: steps, the work between them, and failures in addition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from ..errors import CalibrationError
from ..regressors.estimate import Estimate
from ..regressors.robust import Z_90
from ._remaining_time import Failures, RemainingTime
from .forecast_record import Forecast, ForecastPart

DRIFT_FRAC = 0.01
"""Standard deviation of the level of a steady run between a window and the rest: medians of 50
steps repeat within 0.6 to 4 % on a quiet machine, repeated releases within 2 %."""
CPU_DRIFT_FRAC = 0.09
"""``DRIFT_FRAC`` of CPUs that are shared with other work: root mean square difference between the
remaining and the observed part of 22 runs on such a machine."""
# A standard deviation needs two values.
_MIN_STEPS = 2
# With fewer than five block means, the spread of single steps is more reliable.
_MIN_BLOCKS = 5
_DRIFT_WEIGHT = 8.0
"""Weight of the drift's prior, in blocks."""
# The median of 20 steps scatters by 28 % of the noise of single steps; that of fewer, by more.
_FEW_BLOCKS = 20
# Few and long, as slow drift shows only between long blocks.
_DRIFT_BLOCKS = 6

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanEstimate:
    """Mean of autocorrelated values, with standard error from blocks and degrees of freedom."""

    mean: float
    sd: float
    """Standard deviation of single values."""
    standard_error: float
    long_run_sd: float
    """Standard deviation of a sum of N values over sqrt(N)."""
    degrees: int
    num_values: int


def mean_estimate(values: ArrayLike) -> MeanEstimate:
    """Return the mean with a standard error valid under autocorrelation, by batch means.

    Uses at least five blocks of about sqrt(n) values; the standard error is never below that of
    independent values.  Raises ``CalibrationError`` for fewer than two values.
    """
    array = np.asarray(values, dtype=np.float64)
    count = array.size
    if count < _MIN_STEPS:
        raise CalibrationError(
            f"{count} steps are too few for a mean; record at least {_MIN_STEPS}"
        )
    mean, sd = float(array.mean()), float(array.std(ddof=1))
    size = max(1, min(math.isqrt(count), count // _MIN_BLOCKS))
    num_blocks = count // size
    blocks = array[count - num_blocks * size :].reshape(num_blocks, size).mean(axis=1)
    long_run = float(blocks.std(ddof=1)) * math.sqrt(size) if num_blocks > 1 else sd
    degrees = num_blocks - 1 if long_run > sd else count - 1
    long_run = max(long_run, sd)
    return MeanEstimate(
        mean=mean,
        sd=sd,
        standard_error=long_run / math.sqrt(count),
        long_run_sd=long_run,
        degrees=degrees,
        num_values=count,
    )


def forecast(
    *,
    now_unix_s: float,
    steps_done: int,
    steps_total: int,
    elapsed_s: float,
    step_times_s: ArrayLike = (),
    estimate: Estimate | None = None,
    extras: Sequence[ForecastPart] = (),
    loads: Sequence[tuple[int, Estimate]] = (),
    failures: Failures | None = None,
    drift_frac: float = DRIFT_FRAC,
) -> Forecast:
    """Return the forecast from measured steps, or from the modelled step if fewer than two.

    ``step_times_s`` are full periods (start to start, with logging and data) of unflagged steps,
    oldest first.  ``elapsed_s`` is the time spent, including start-up.  ``extras`` is work
    between steps.  ``loads`` has numbers of remaining steps with their time over that of measured
    ones; by default all are as measured.  The variance of the sum is long_run_sd^2 (N^2/n + N) for
    N steps from n, plus the square of ``drift_frac`` of the whole.

    Raises ``CalibrationError`` without a measured or modelled step.
    """
    step = _step(np.asarray(step_times_s, dtype=np.float64), estimate)
    num_remaining_steps = max(0, steps_total - steps_done)
    loads = loads or ((num_remaining_steps, Estimate(median=1.0)),)
    steps_s = step.mean * sum(number * ratio.median for number, ratio in loads)
    extras_s = sum(extra.time_s for extra in extras)
    wide = float(stdtrit(step.degrees, 0.95))
    # Replace Student's t by a normal with the same 95 % quantile, so that any level is defined.
    sigma_s = _remaining_sigma(step, loads, extras, drift_frac) * wide / Z_90
    work_s = steps_s + extras_s
    remaining_time = RemainingTime.normal(work_s, sigma_s)
    if failures is not None:
        remaining_time = RemainingTime.with_failures(work_s, sigma_s, failures)
    mean_half_s = wide * step.standard_error
    single = wide * math.hypot(step.sd, step.standard_error, drift_frac * step.mean)
    median_s, high_s = remaining_time.quantile(0.5), remaining_time.quantile(0.95)
    return Forecast(
        now_unix_s=now_unix_s,
        steps_done=steps_done,
        steps_left=num_remaining_steps,
        is_measured=step.num_values > 0,
        num_samples=step.num_values,
        step_time_s=step.mean,
        step_low_s=max(0.0, step.mean - mean_half_s),
        step_high_s=step.mean + mean_half_s,
        single_low_s=max(0.0, step.mean - single),
        single_high_s=step.mean + single,
        steps_s=steps_s,
        extras_s=extras_s,
        failures_s=remaining_time.mean_s - steps_s - extras_s,
        remaining_s=median_s,
        remaining_low_s=remaining_time.quantile(0.05),
        remaining_high_s=high_s,
        remaining_time=remaining_time,
        elapsed_s=elapsed_s,
        total_s=elapsed_s + median_s,
        finish_p50_unix_s=now_unix_s + median_s,
        finish_p95_unix_s=now_unix_s + high_s,
    )


def learned_drift_frac(step_times_s: ArrayLike, *, prior_frac: float = DRIFT_FRAC) -> float:
    """Return the relative drift of the run's level (standard deviation), learned from its steps.

    It is the spread of medians of long blocks in excess of the noise of single steps, pooled with
    the prior, which weighs eight blocks.  ``prior_frac`` is returned if there are too few steps.
    """
    values = np.asarray(step_times_s, dtype=np.float64)
    size = values.size // _DRIFT_BLOCKS
    if size < _FEW_BLOCKS:
        return prior_frac
    logs = np.log(values[values.size - size * _DRIFT_BLOCKS :].reshape(_DRIFT_BLOCKS, size))
    medians = np.median(logs, axis=1)
    within = float(np.median(logs.std(axis=1, ddof=1))) * math.sqrt(math.pi / 2 / size)
    wander2 = max(0.0, float(medians.var(ddof=1)) - within**2)
    degrees = _DRIFT_BLOCKS - 1
    pooled = _DRIFT_WEIGHT * prior_frac**2 + degrees * wander2
    return math.sqrt(pooled / (_DRIFT_WEIGHT + degrees))


def _remaining_sigma(
    step: MeanEstimate,
    loads: Sequence[tuple[int, Estimate]],
    extras: Sequence[ForecastPart],
    drift_frac: float,
) -> float:
    counts = np.asarray([number for number, _ in loads], dtype=np.float64)
    ratios = np.asarray([ratio.median for _, ratio in loads])
    sigmas = np.asarray([ratio.sigma_log for _, ratio in loads])
    whole = float(np.dot(counts, ratios))
    variance = (whole * step.standard_error) ** 2
    variance += float(np.dot(counts, ratios**2)) * step.long_run_sd**2
    variance += (drift_frac * whole * step.mean) ** 2
    # All ratios are from one model, so that their errors are correlated.
    variance += (step.mean * float(np.dot(counts * ratios, sigmas))) ** 2
    variance += sum(extra.sigma_s**2 for extra in extras)
    return math.sqrt(variance)


def _step(values: Floats, estimate: Estimate | None) -> MeanEstimate:
    if values.size >= _MIN_STEPS:
        return mean_estimate(values)
    if estimate is None:
        raise CalibrationError(
            f"{values.size} measured steps and no modelled one; record at least {_MIN_STEPS} steps"
        )
    sigma_s = estimate.median * estimate.sigma_log
    return MeanEstimate(
        mean=estimate.median,
        sd=sigma_s,
        standard_error=sigma_s,
        long_run_sd=0.0,
        # The model's error is normal, hence unlimited degrees of freedom.
        degrees=10**6,
        num_values=0,
    )
