"""When the run ends: what is left of it as wall-clock time, with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from ..errors import CalibrationError
from ..timeline.step import StepEstimate

SCHEMA = 1
DRIFT_FRAC = 0.01
"""Standard deviation of the level of a steady run between a window and the rest: medians of 50
steps repeat within 0.6 to 4 % on a quiet machine, repeated releases within 2 %."""
_MIN_STEPS = 2
_MIN_BLOCKS = 5

Floats = NDArray[np.float64]


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
    num_left: int
    time_s: float
    sigma_s: float = 0.0
    """Standard error of ``time_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The run to its end.  All intervals are 90 %; ``p95`` has 5 % beyond it."""

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
    remaining_s: float
    remaining_low_s: float
    remaining_high_s: float
    remaining_sigma_s: float
    elapsed_s: float
    total_s: float
    finish_p50_unix_s: float
    finish_p95_unix_s: float

    def to_json(self) -> dict[str, Any]:
        """A JSON object with its schema."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"schema": SCHEMA, **values}


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
    drift_frac: float = DRIFT_FRAC,
) -> Forecast:
    """The forecast from measured steps, or from the modelled one where fewer than two are there.

    ``step_times_s`` are full periods (start to start, so logging and data are in) of unflagged
    steps, oldest first.  ``elapsed_s`` is what the run has spent, start-up included.  The variance
    of the sum is long_run_sd^2 (N^2/n + N) for N steps from n, plus ``drift_frac`` of the whole.
    Raises ``CalibrationError`` where there is neither a measured nor a modelled step.
    """
    step = _step(np.asarray(step_times_s, dtype=np.float64), estimate)
    left = max(0, steps_total - steps_done)
    steps_s = left * step.mean
    extras_s = sum(extra.num_left * extra.time_s for extra in extras)
    sigma_s = _remaining_sigma(step, left, extras, drift_frac)
    wide = float(stats.t.ppf(0.95, step.degrees))
    remaining = steps_s + extras_s
    high = remaining + wide * sigma_s
    own = wide * step.standard_error
    single = wide * math.hypot(step.sd, step.standard_error)
    return Forecast(
        now_unix_s=now_unix_s,
        steps_done=steps_done,
        steps_left=left,
        is_measured=step.num_values > 0,
        num_samples=step.num_values,
        step_time_s=step.mean,
        step_low_s=max(0.0, step.mean - own),
        step_high_s=step.mean + own,
        single_low_s=max(0.0, step.mean - single),
        single_high_s=step.mean + single,
        steps_s=steps_s,
        extras_s=extras_s,
        remaining_s=remaining,
        remaining_low_s=max(0.0, remaining - wide * sigma_s),
        remaining_high_s=high,
        # Seen as a normal variable of the same 95 % point, so that rules can ask for any level.
        remaining_sigma_s=wide * sigma_s / float(stats.norm.ppf(0.95)),
        elapsed_s=elapsed_s,
        total_s=elapsed_s + remaining,
        finish_p50_unix_s=now_unix_s + remaining,
        finish_p95_unix_s=now_unix_s + high,
    )


def num_left(*, steps_done: int, steps_total: int, interval: int) -> int:
    """How often something that happens every ``interval`` steps is still to come (0: never).

    >>> num_left(steps_done=150, steps_total=1000, interval=100)
    9
    """
    return steps_total // interval - steps_done // interval if interval > 0 else 0


def _remaining_sigma(
    step: MeanEstimate, left: int, extras: Sequence[Extra], drift_frac: float
) -> float:
    variance = (left * step.standard_error) ** 2 + left * step.long_run_sd**2
    variance += (drift_frac * left * step.mean) ** 2
    variance += sum((extra.num_left * extra.sigma_s) ** 2 for extra in extras)
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
        degrees=10**6,
        num_values=0,
    )
