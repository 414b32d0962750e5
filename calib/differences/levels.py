"""How far two runs lie apart, with what the machine does between windows and between runs.

Steps of a window go together, windows of a run differ by more than their steps explain, and another
run meets the machine as yet another window would: three errors, of which only the first two shrink
with more steps and windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from ..answers.run_measurements import ONE_STEP_SIGMA_LOG
from ..answers.run_steps import CPU_SESSION_SIGMA_LOG, SESSION_SIGMA_LOG
from ..forecast.forecast import CPU_DRIFT_FRAC, DRIFT_FRAC, mean_estimate
from ..samples.reduce import MEDIAN_OVER_MEAN
from ..units import format_frac

Floats = NDArray[np.float64]

FALSE_ALARM = 0.02
"""Chance that a difference is claimed between two runs that differ in nothing."""
_SURE = 1e6
"""Degrees of freedom of what is known and not estimated."""
_OF_INTERVAL = 0.95
"""Both ends of a 90 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A quantity of a run, one value for each of its windows.

    ``again`` is how far the quantity lies apart, as a standard deviation in the same unit, when the
    same is run once more.
    """

    values: tuple[float, ...]
    again: float
    noise: float = 0.0
    """Standard error of a window's value from the scatter of its steps; 0 where it is not known."""
    noise_freedom: float = _SURE

    @property
    def mean(self) -> float:
        """Over the windows."""
        return float(np.mean(self.values))

    @property
    def _variance(self) -> float:
        return float(np.var(self.values, ddof=1)) if len(self.values) > 1 else 0.0

    @property
    def _wander2(self) -> float:
        """Variance between windows that their steps do not explain."""
        return max(0.0, self._variance - self.noise**2)

    def errors(self, other: Level) -> list[tuple[float, float]]:
        """Variances of the level and their degrees of freedom.

        A run is one more draw of what moves its windows, so that part does not shrink with their
        number; where a single window shows none of it, that of ``other`` stands in.
        """
        number = len(self.values)
        shown = self if number > 1 else other
        wander2, freedom = shown._wander2, max(1, len(shown.values) - 1)
        mean2 = self._variance / number if number > 1 else self.noise**2
        of_mean = number - 1 if number > 1 else self.noise_freedom
        if wander2 <= self.again**2:
            return [(mean2, of_mean), (self.again**2, _SURE)]
        if shown is self:
            return [(mean2 + wander2, freedom)]
        return [(mean2, of_mean), (wander2, freedom)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Of a second level against a first: the difference, and its 90 % interval."""

    value: float
    low: float
    high: float
    least: float
    """Smallest difference that would be told from none."""
    chance: float
    """How often two runs that differ in nothing lie as far apart."""

    @property
    def is_shown(self) -> bool:
        """Whether the runs tell it from none."""
        return abs(self.value) > self.least


def change(first: Level, second: Level, *, num_compared: int = 1) -> Change:
    """The second less the first; claims share ``FALSE_ALARM`` among as many as are compared.

    Student's t with the degrees of freedom of Welch (1947) and Satterthwaite (1946).
    """
    parts = [*first.errors(second), *second.errors(first)]
    variance = sum(part for part, _ in parts)
    value = second.mean - first.mean
    if variance <= 0:
        chance = 1.0 if value == 0 else 0.0
        return Change(value=value, low=value, high=value, least=0.0, chance=chance)
    freedom = max(1.0, variance**2 / sum(part**2 / degrees for part, degrees in parts))
    error = math.sqrt(variance)
    half = float(stdtrit(freedom, _OF_INTERVAL)) * error
    tail = FALSE_ALARM / (2 * num_compared)
    return Change(
        value=value,
        low=value - half,
        high=value + half,
        least=float(stdtrit(freedom, 1 - tail)) * error,
        chance=min(1.0, 2 * num_compared * float(stdtr(freedom, -abs(value) / error))),
    )


def log_level(windows: Sequence[Floats], *, again_log: float) -> Level:
    """Of the steps of each window, seconds: medians of their logarithms.

    The scatter of a window's steps counts with their autocorrelation (batch means).
    """
    logs = [np.log(steps) for steps in windows]
    known = [(mean_estimate(one), len(one)) for one in logs if len(one) > 1]
    noise2 = [(MEDIAN_OVER_MEAN * found.standard_error) ** 2 for found, _ in known]
    return Level(
        values=tuple(float(np.median(one)) for one in logs),
        again=again_log,
        noise=math.sqrt(float(np.mean(noise2))) if noise2 else ONE_STEP_SIGMA_LOG,
        noise_freedom=float(sum(found.degrees for found, _ in known)) or 1.0,
    )


def again_log(windows: Sequence[Floats], device: str, *, is_one_run: bool) -> float:
    """How far the logarithm of a step lies apart when the same is run once more, or in another
    window of one run.

    What is known of accelerators and of processors; on processors, which others share, no less than
    single steps scatter in their windows: what slows single steps comes and goes over longer times.
    Without two steps in a window that of one step.
    """
    if device != "cpu":
        return DRIFT_FRAC if is_one_run else SESSION_SIGMA_LOG
    known = CPU_DRIFT_FRAC if is_one_run else CPU_SESSION_SIGMA_LOG
    logs = [np.log(one) for one in windows]
    freedom = sum(len(one) - 1 for one in logs)
    if not freedom:
        return max(known, ONE_STEP_SIGMA_LOG)
    squares = sum(float(np.sum((one - one.mean()) ** 2)) for one in logs)
    return max(known, math.sqrt(squares / freedom))


def frac_text(log: float) -> str:
    """By how much a ratio lies from 1, without its sign.

    >>> frac_text(math.log(1.25)), frac_text(math.log(0.8))
    ('25.0 %', '20.0 %')
    """
    return format_frac(abs(math.expm1(log)))
