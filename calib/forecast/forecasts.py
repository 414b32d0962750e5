"""When the run ends: what is left of it as wall-clock time, with an interval.

The time left is a distribution: of steps, the work between them, and failures on top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri, stdtrit

from ..errors import CalibrationError
from ..regressors import Z_90
from ..steps import StepEstimate
from ..workload import Encoded

SCHEMA = 1
DRIFT_FRAC = 0.01
"""Standard deviation of the level of a steady run between a window and the rest: medians of 50
steps repeat within 0.6 to 4 % on a quiet machine, repeated releases within 2 %."""
CPU_DRIFT_FRAC = 0.09
"""The same on processors that other work shares: what was left of 22 runs on such a machine against
what was seen of them, root mean square."""
# A scatter needs two values.
_MIN_STEPS = 2
# Five means are the fewest whose spread says more than that of single steps.
_MIN_BLOCKS = 5
_DRIFT_WEIGHT = 8.0
"""Blocks that the prior of the drift is worth."""
# The median of 20 steps moves by 28 % of the steps' own noise; of fewer, by more.
_FEW_BLOCKS = 20
# Few and long: what wanders slowly shows only between long blocks.
_DRIFT_BLOCKS = 6

Floats = NDArray[np.float64]
# Probability of all larger numbers of failures together: far below what any rule asks for.
_NEGLIGIBLE = 1e-9
# More are no run; the normal parts overlap long before, and each costs a term of every quantile.
_MAX_FAILURES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failures of a run as a Poisson process, and what one of them costs."""

    mtbf_s: float
    """Mean time between failures of the whole job, seconds."""
    restart_s: float
    """From the failure until training goes on."""
    save_every_s: float = 0.0
    """Time between checkpoints: what was done since the last one is done again."""

    @property
    def mean_cost_s(self) -> float:
        """Restart plus half the time between checkpoints."""
        return self.restart_s + 0.5 * self.save_every_s

    @property
    def cost_variance_s2(self) -> float:
        """The lost work lies evenly between nothing and all since the last checkpoint."""
        return self.save_every_s**2 / 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingTime:
    """A mixture of normal distributions, one for each number of failures.

    >>> remaining = RemainingTime.normal(100.0, 10.0)
    >>> round(remaining.quantile(0.95), 1), round(remaining.chance_beyond(100.0), 2)
    (116.4, 0.5)
    """

    weights: tuple[float, ...]
    means_s: tuple[float, ...]
    sigmas_s: tuple[float, ...]

    @staticmethod
    def normal(mean_s: float, sigma_s: float) -> RemainingTime:
        """Without failures."""
        return RemainingTime(weights=(1.0,), means_s=(mean_s,), sigmas_s=(max(sigma_s, 0.0),))

    @staticmethod
    def with_failures(mean_s: float, sigma_s: float, failures: Failures) -> RemainingTime:
        """Work of ``mean_s`` +- ``sigma_s``, interrupted at random.

        The number of failures is Poisson with mean ``mean_s / mtbf_s`` (those during repeated work
        are of second order and left out); each costs a restart and what is lost.
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
        """P(the time left > ``time_s``)."""
        sigmas = np.asarray(self.sigmas_s)
        away = time_s - np.asarray(self.means_s)
        with np.errstate(divide="ignore", invalid="ignore"):
            tails = np.where(sigmas > 0, ndtr(-away / sigmas), away < 0)
        return float(np.dot(self.weights, tails))

    def quantile(self, level: float) -> float:
        """The time that is not exceeded with probability ``level``; at least 0."""
        means, sigmas = np.asarray(self.means_s), np.asarray(self.sigmas_s)
        if len(means) == 1:
            return max(0.0, float(means[0] + sigmas[0] * ndtri(level)))
        from scipy import optimize  # likewise

        # A normal distribution has 2e-33 beyond twelve deviations: the root is always inside.
        reach = 12.0 * sigmas + 1e-9
        low, high = float((means - reach).min()), float((means + reach).max())
        solution = optimize.root_scalar(
            lambda time_s: 1.0 - self.chance_beyond(time_s) - level, bracket=(low, high)
        )
        return max(0.0, float(solution.root))

    def nodes(self, count: int = 128) -> Floats:
        """Times at the middles of ``count`` equally likely parts, for integrals over the time."""
        levels = (np.arange(count) + 0.5) / count
        if len(self.weights) == 1:
            sigma = self.sigmas_s[0]
            return np.maximum(0.0, self.means_s[0] + sigma * ndtri(levels))
        return np.asarray([self.quantile(float(level)) for level in levels])


def learned_mtbf_s(num_failures: int, run_s: float, *, prior_mtbf_s: float) -> float:
    """Mean time between failures after ``num_failures`` in ``run_s`` seconds of this job.

    Posterior mean of the rate under a gamma prior worth one failure; never infinite, since a run
    without a failure so far proves little.

    >>> learned_mtbf_s(0, 0.0, prior_mtbf_s=3600.0)
    3600.0
    """
    # Gamma prior and Poisson counts: shape and rate add up.
    return (prior_mtbf_s + max(run_s, 0.0)) / (1.0 + num_failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanEstimate:
    """Mean of autocorrelated values: standard error from blocks, and the freedom it has."""

    mean: float
    sd: float
    """Standard deviation of single values."""
    standard_error: float
    long_run_sd: float
    """Standard deviation that a sum of N values shows, over sqrt(N)."""
    degrees: int
    num_values: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Work between steps, such as evaluations or saves: how many are left and what one takes."""

    name: str
    num_remaining: int
    time_s: float
    sigma_s: float = 0.0
    """Standard error of ``time_s``."""
    scatter_s: float = 0.0
    """Standard deviation of single ones."""
    provenance: str = "measured"

    @property
    def all_sigma_s(self) -> float:
        """Standard deviation of all that are left: a common error, and what each has of its own."""
        return math.hypot(
            self.num_remaining * self.sigma_s, math.sqrt(self.num_remaining) * self.scatter_s
        )

    @property
    def part(self) -> ForecastPart:
        """All that are left, as a part of the forecast."""
        return ForecastPart(
            name=self.name,
            num_left=self.num_remaining,
            time_s=self.num_remaining * self.time_s,
            sigma_s=self.all_sigma_s,
            provenance=self.provenance,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastPart:
    """One kind of what is left, and what its time rests on."""

    name: str
    num_left: float
    time_s: float
    """All of them together."""
    sigma_s: float
    provenance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """Steps that are left at one global batch size, relative to the steps that were measured."""

    num_remaining: int
    time_ratio: float = 1.0
    sigma_log: float = 0.0
    """Standard deviation of the logarithm of ``time_ratio``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast(Encoded):
    """The run to its end.  All intervals are 90 %; ``p95`` has 5 % beyond it."""

    JSON: ClassVar[str] = "schema * -remaining_time"
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
    """Interval in which the next single step lies."""
    steps_s: float
    """Steps that are left."""
    extras_s: float
    """Evaluations, saves and the like that are left."""
    failures_s: float
    """What failures and restarts are expected to cost."""
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
    """What ``remaining_time`` is made of."""
    gpu_hours: float | None = None
    """Of this launch from its begin to the end; None on processors that have no price."""
    cost: float | None = None
    """In the currency of the price that was given."""
    energy_j: float | None = None
    """Of all accelerators, from the first reading to the end."""


def mean_estimate(values: ArrayLike) -> MeanEstimate:
    """Mean with a standard error that holds under autocorrelation, by batch means.

    Blocks of about sqrt(n) values, at least five of them; a positive autocorrelation can only widen
    what independent values would give.  Raises ``CalibrationError`` below two values.
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
    estimate: StepEstimate | None = None,
    extras: Sequence[Extra] = (),
    loads: Sequence[StepLoad] = (),
    failures: Failures | None = None,
    drift_frac: float = DRIFT_FRAC,
) -> Forecast:
    """The forecast from measured steps, or from the modelled one where fewer than two are there.

    ``step_times_s`` are full periods (start to start, so logging and data are in) of unflagged
    steps, oldest first.  ``elapsed_s`` is what the run has spent, start-up included.  ``loads``
    says where later steps are longer or shorter; without it all that are left are as measured.
    The variance of the sum is long_run_sd^2 (N^2/n + N) for N steps from n, plus ``drift_frac`` of
    the whole.  Raises ``CalibrationError`` where there is neither a measured nor a modelled step.
    """
    step = _step(np.asarray(step_times_s, dtype=np.float64), estimate)
    num_remaining_steps = max(0, steps_total - steps_done)
    loads = loads or (StepLoad(num_remaining=num_remaining_steps),)
    steps_s = step.mean * sum(load.num_remaining * load.time_ratio for load in loads)
    extras_s = sum(extra.num_remaining * extra.time_s for extra in extras)
    wide = float(stdtrit(step.degrees, 0.95))
    # Seen as a normal variable of the same 95 % point, so that rules can ask for any level.
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
    """How far the level of this run wanders, relative, from what it has shown so far.

    The spread of medians of long blocks beyond what single steps explain, pooled with the prior as
    if that were eight blocks.  A run that has been steady for long comes down to what it shows.
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
    ratios = np.asarray([load.time_ratio for load in loads])
    sigmas = np.asarray([load.sigma_log for load in loads])
    whole = float(np.dot(counts, ratios))
    variance = (whole * step.standard_error) ** 2
    variance += float(np.dot(counts, ratios**2)) * step.long_run_sd**2
    variance += (drift_frac * whole * step.mean) ** 2
    # One model gives all ratios, so that their errors go together.
    variance += (step.mean * float(np.dot(counts * ratios, sigmas))) ** 2
    variance += sum(extra.all_sigma_s**2 for extra in extras)
    return math.sqrt(variance)


def _step(values: Floats, estimate: StepEstimate | None) -> MeanEstimate:
    if values.size >= _MIN_STEPS:
        return mean_estimate(values)
    if estimate is None:
        raise CalibrationError(
            f"{values.size} measured steps and no modelled one; record at least {_MIN_STEPS} steps"
        )
    sigma_s = estimate.time_s * estimate.sigma_log
    return MeanEstimate(
        mean=estimate.time_s,
        sd=sigma_s,
        standard_error=sigma_s,
        long_run_sd=0.0,
        # The model's error is stated as normal: no freedom is lost.
        degrees=10**6,
        num_values=0,
    )
