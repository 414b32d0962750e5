"""Forecast of the remaining run as wall-clock time, with an interval.

The remaining time is a distribution: steps, the work between them, and failures in addition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri, stdtrit

from ..errors import CalibrationError, check_ascending
from ..plain_json import JsonObject
from ..regressors.estimate import Estimate
from ..regressors.robust import Z_90
from ..workload.config_json import Encoded, encode_fields, encoded

SCHEMA = 1
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
_SAME = Estimate(median=1.0)
# Total probability of larger numbers of failures; far below the precision that any rule needs.
_NEGLIGIBLE = 1e-9
# No run has more; components overlap long before, and each adds a term to every quantile.
_MAX_FAILURES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failures of a run as a Poisson process, and the cost of one."""

    mtbf_s: float
    """Mean time between failures of the whole job, seconds."""
    restart_s: float
    """Seconds from the failure until training resumes."""
    save_every_s: float = 0.0
    """Time between checkpoints; work since the last one is repeated."""

    @property
    def mean_cost_s(self) -> float:
        """Mean cost of a failure: restart plus half the time between checkpoints."""
        return self.restart_s + 0.5 * self.save_every_s

    @property
    def cost_variance_s2(self) -> float:
        """Variance of the lost work, uniform from 0 to the time between checkpoints."""
        return self.save_every_s**2 / 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingTime:
    """Remaining time as a mixture of normal distributions, one for each number of failures.

    >>> remaining = RemainingTime.normal(100.0, 10.0)
    >>> round(remaining.quantile(0.95), 1), round(remaining.chance_beyond(100.0), 2)
    (116.4, 0.5)
    """

    weights: tuple[float, ...]
    means_s: tuple[float, ...]
    sigmas_s: tuple[float, ...]

    @staticmethod
    def normal(mean_s: float, sigma_s: float) -> RemainingTime:
        """Return the distribution without failures."""
        return RemainingTime(weights=(1.0,), means_s=(mean_s,), sigmas_s=(max(sigma_s, 0.0),))

    @staticmethod
    def with_failures(mean_s: float, sigma_s: float, failures: Failures) -> RemainingTime:
        """Return the distribution of work of ``mean_s`` +- ``sigma_s`` with random failures.

        The number of failures is Poisson with mean ``mean_s / mtbf_s`` (failures during repeated
        work are second-order and neglected); each costs a restart and the lost work.
        """
        from scipy import stats  # slow to import, and only failures need it

        expected = mean_s / failures.mtbf_s
        last = min(_MAX_FAILURES, int(stats.poisson.ppf(1.0 - _NEGLIGIBLE, expected)))
        counts = np.arange(last + 1)
        chances = stats.poisson.pmf(counts, expected)
        chances /= chances.sum()
        means = mean_s + counts * failures.mean_cost_s
        sigmas = np.sqrt(sigma_s**2 + counts * failures.cost_variance_s2)
        return RemainingTime(
            weights=tuple(chances.tolist()),
            means_s=tuple(means.tolist()),
            sigmas_s=tuple(sigmas.tolist()),
        )

    @property
    def mean_s(self) -> float:
        """Expected time, seconds."""
        return float(np.dot(self.weights, self.means_s))

    def chance_beyond(self, time_s: float) -> float:
        """Return P(remaining time > ``time_s``)."""
        sigmas = np.asarray(self.sigmas_s)
        away = time_s - np.asarray(self.means_s)
        with np.errstate(divide="ignore", invalid="ignore"):
            tails = np.where(sigmas > 0, ndtr(-away / sigmas), away < 0)
        return float(np.dot(self.weights, tails))

    def quantile(self, level: float) -> float:
        """Return the time that is not exceeded with probability ``level``; at least 0."""
        means, sigmas = np.asarray(self.means_s), np.asarray(self.sigmas_s)
        if len(means) == 1:
            return max(0.0, float(means[0] + sigmas[0] * ndtri(level)))
        from scipy import optimize  # slow to import, and only failures need it

        # A normal distribution has 2e-33 beyond twelve standard deviations: the root is inside.
        reach = 12.0 * sigmas + 1e-9
        low, high = float((means - reach).min()), float((means + reach).max())
        solution = optimize.root_scalar(
            lambda time_s: 1.0 - self.chance_beyond(time_s) - level, bracket=(low, high)
        )
        return max(0.0, float(solution.root))

    def nodes(self, count: int = 128) -> Floats:
        """Return times at the midpoints of ``count`` equally likely parts, for quadrature."""
        levels = (np.arange(count) + 0.5) / count
        if len(self.weights) == 1:
            sigma = self.sigmas_s[0]
            return np.maximum(0.0, self.means_s[0] + sigma * ndtri(levels))
        return np.asarray([self.quantile(float(level)) for level in levels])


def learned_mtbf_s(num_failures: int, run_s: float, *, prior_mtbf_s: float) -> float:
    """Return the mean time between failures after ``num_failures`` in ``run_s`` seconds of a job.

    Inverse of the posterior mean of the rate under a gamma prior worth one failure; never infinite,
    as a run without failures so far proves little.

    >>> learned_mtbf_s(0, 0.0, prior_mtbf_s=3600.0)
    3600.0
    """
    # Gamma prior and Poisson counts: shape and rate add up.
    return (prior_mtbf_s + max(run_s, 0.0)) / (1.0 + num_failures)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Work between steps, such as evaluations or saves: remaining number and time of one."""

    name: str
    num_remaining: int
    time_s: float
    sigma_s: float = 0.0
    """Standard error of ``time_s``."""
    scatter_s: float = 0.0
    """Standard deviation of a single one."""
    provenance: str = "measured"

    @property
    def all_sigma_s(self) -> float:
        """Standard deviation of the remaining total: common error and individual scatter."""
        return math.hypot(
            self.num_remaining * self.sigma_s, math.sqrt(self.num_remaining) * self.scatter_s
        )

    @property
    def part(self) -> ForecastPart:
        """Remaining total, as a part of the forecast."""
        return ForecastPart(
            name=self.name,
            num_left=self.num_remaining,
            time_s=self.num_remaining * self.time_s,
            sigma_s=self.all_sigma_s,
            provenance=self.provenance,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastPart:
    """One kind of remaining work, with the provenance of its time."""

    name: str
    num_left: float
    time_s: float
    """Total time of the remaining ones."""
    sigma_s: float
    provenance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """Remaining steps at one global batch size, with their time relative to measured steps."""

    num_remaining: int
    time_ratio: Estimate = _SAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast(Encoded):
    """Forecast of the run to its end.  All intervals are 90 %; ``p95`` is the 95 % quantile."""

    schema: ClassVar[int] = SCHEMA

    now_unix_s: float
    steps_done: int
    steps_left: int
    is_measured: bool
    num_samples: int
    step_time_s: float
    step_low_s: float
    step_high_s: float
    """Interval of the mean step."""
    single_low_s: float
    single_high_s: float
    """Interval of the next single step."""
    steps_s: float
    """Time of the remaining steps."""
    extras_s: float
    """Time of remaining evaluations, saves and other work between steps."""
    failures_s: float
    """Expected cost of failures and restarts."""
    remaining_s: float
    """Median of ``remaining_time``."""
    remaining_low_s: float
    remaining_high_s: float
    remaining_time: RemainingTime
    elapsed_s: float
    total_s: float
    finish_p50_unix_s: float
    finish_p95_unix_s: float
    parts: tuple[ForecastPart, ...] = ()
    """Breakdown of ``remaining_time``."""
    gpu_hours: float | None = None
    """GPU-hours of this launch from begin to end; None on CPUs without a price."""
    cost: float | None = None
    """Cost in the currency of the stated price."""
    energy_j: float | None = None
    """Energy of all accelerators from the first reading to the end."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(schema=self.schema, **encode_fields(self, "remaining_time"))

    def __post_init__(self) -> None:
        step_s, ahead_s = self.step_time_s, self.remaining_s
        check_ascending("seconds of the mean step", 0.0, self.step_low_s, step_s, self.step_high_s)
        check_ascending(
            "seconds of the next step", 0.0, self.single_low_s, step_s, self.single_high_s
        )
        check_ascending("seconds to go", 0.0, self.remaining_low_s, ahead_s, self.remaining_high_s)


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
    extras: Sequence[Extra] = (),
    loads: Sequence[StepLoad] = (),
    failures: Failures | None = None,
    drift_frac: float = DRIFT_FRAC,
) -> Forecast:
    """Return the forecast from measured steps, or from the modelled step if fewer than two.

    ``step_times_s`` are full periods (start to start, with logging and data) of unflagged steps,
    oldest first.  ``elapsed_s`` is the time spent, including start-up.  ``loads`` describes later
    steps that are longer or shorter; by default all remaining steps are as measured.  The variance
    of the sum is long_run_sd^2 (N^2/n + N) for N steps from n, plus the square of ``drift_frac`` of
    the whole.  Raises ``CalibrationError`` without a measured or modelled step.
    """
    step = _step(np.asarray(step_times_s, dtype=np.float64), estimate)
    num_remaining_steps = max(0, steps_total - steps_done)
    loads = loads or (StepLoad(num_remaining=num_remaining_steps),)
    steps_s = step.mean * sum(load.num_remaining * load.time_ratio.median for load in loads)
    extras_s = sum(extra.num_remaining * extra.time_s for extra in extras)
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
    step: MeanEstimate, loads: Sequence[StepLoad], extras: Sequence[Extra], drift_frac: float
) -> float:
    counts = np.asarray([load.num_remaining for load in loads], dtype=np.float64)
    ratios = np.asarray([load.time_ratio.median for load in loads])
    sigmas = np.asarray([load.time_ratio.sigma_log for load in loads])
    whole = float(np.dot(counts, ratios))
    variance = (whole * step.standard_error) ** 2
    variance += float(np.dot(counts, ratios**2)) * step.long_run_sd**2
    variance += (drift_frac * whole * step.mean) ** 2
    # All ratios are from one model, so that their errors are correlated.
    variance += (step.mean * float(np.dot(counts * ratios, sigmas))) ** 2
    variance += sum(extra.all_sigma_s**2 for extra in extras)
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
