"""Difference of two runs with an interval that covers changes of the machine between runs.

The error has three parts: scatter of steps within a window, drift between windows beyond that
scatter, and the difference between runs, which meet the machine as another window would.  Only the
first two shrink with more steps and windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from ..answers.measured_steps import CPU_SESSION_SIGMA_LOG, SESSION_SIGMA_LOG
from ..answers.run_measurements import ONE_STEP_SIGMA_LOG
from ..drift.attribution import Cause, CauseKind
from ..forecast.forecasts import CPU_DRIFT_FRAC, DRIFT_FRAC, mean_estimate
from ..plain_json import JsonObject
from ..samples.reduce import MEDIAN_OVER_MEAN
from ..units import format_frac, format_time
from ..workload.config_json import Encoded, encoded
from ._settings import SettingChange

Floats = NDArray[np.float64]

FALSE_ALARM = 0.02
"""Probability that a difference is claimed between two identical runs."""
_SURE = 1e6
"""Degrees of freedom of known variances."""
_OF_INTERVAL = 0.95
"""Quantile level of the ends of a 90 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A quantity of a run, one value for each of its windows.

    ``repeat_sigma`` is the standard deviation of the quantity between repetitions of the same run,
    in the same unit.
    """

    values: tuple[float, ...]
    repeat_sigma: float
    noise: float = 0.0
    """Standard error of a window's value from the scatter of its steps; 0 if unknown."""
    noise_freedom: float = _SURE

    @property
    def mean(self) -> float:
        """Mean over the windows."""
        return float(np.mean(self.values))

    @property
    def _variance(self) -> float:
        return float(np.var(self.values, ddof=1)) if len(self.values) > 1 else 0.0

    def errors(self, other: Level) -> list[tuple[float, float]]:
        """Return variances of the level with their degrees of freedom.

        A run is one more draw of the drift between windows, so that this part does not shrink with
        their number; a single window has no estimate of it, and uses that of ``other``.
        """
        number = len(self.values)
        shown = self if number > 1 else other
        # Variance between windows in excess of the noise of their steps.
        wander2 = max(0.0, shown._variance - shown.noise**2)
        freedom = max(1, len(shown.values) - 1)
        mean2 = self._variance / number if number > 1 else self.noise**2
        of_mean = number - 1 if number > 1 else self.noise_freedom
        if wander2 <= self.repeat_sigma**2:
            return [(mean2, of_mean), (self.repeat_sigma**2, _SURE)]
        if shown is self:
            return [(mean2 + wander2, freedom)]
        return [(mean2, of_mean), (wander2, freedom)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Difference of a second level from a first, with its 90 % interval."""

    value: float
    low: float
    high: float
    least: float
    """Smallest significant difference."""
    chance: float
    """Probability of such a difference between identical runs (p-value)."""

    @property
    def is_shown(self) -> bool:
        """True if the difference is significant."""
        return abs(self.value) > self.least


def compare_levels(first: Level, second: Level, *, num_compared: int = 1) -> Change:
    """Return the second level minus the first; ``num_compared`` tests share ``FALSE_ALARM``.

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


def log_level(windows: Sequence[Floats], *, repeat_sigma_log: float) -> Level:
    """Return the level of the log step: the median per window; ``windows`` are steps in seconds.

    The noise accounts for autocorrelation of a window's steps (batch means).
    """
    logs = [np.log(steps) for steps in windows]
    known = [(mean_estimate(one), len(one)) for one in logs if len(one) > 1]
    noise2 = [(MEDIAN_OVER_MEAN * estimate.standard_error) ** 2 for estimate, _ in known]
    return Level(
        values=tuple(float(np.median(one)) for one in logs),
        repeat_sigma=repeat_sigma_log,
        noise=math.sqrt(float(np.mean(noise2))) if noise2 else ONE_STEP_SIGMA_LOG,
        noise_freedom=float(sum(estimate.degrees for estimate, _ in known)) or 1.0,
    )


def estimate_repeat_sigma_log(windows: Sequence[Floats], device: str, *, is_one_run: bool) -> float:
    """Return the standard deviation of the log step between repeated runs, or windows of one run.

    It is a constant on accelerators.  On CPUs, which are shared, it is the larger of a constant and
    the scatter of single steps within windows (without two steps in a window, that of one step), as
    the causes of slow steps also vary over longer times.
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
    """Return the absolute deviation of a ratio from 1, given its logarithm.

    >>> frac_text(math.log(1.25)), frac_text(math.log(0.8))
    ('25.0 %', '20.0 %')
    """
    return format_frac(abs(math.expm1(log)))


SCHEMA = 1


class Verdict(Enum):
    """Verdict on the second run against the first."""

    SLOWER = "slower"
    FASTER = "faster"
    NO_DIFFERENCE = "no difference shown"
    NOT_COMPARABLE = "not comparable"


class Basis(Enum):
    """Quantity that the verdict compares."""

    STEP_TIME = "time per step"
    THROUGHPUT = "tokens/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side(Encoded):
    """One of the two runs."""

    run_id: str
    windows: tuple[int, ...]
    num_steps: int
    """Number of clean steps that its level is from."""
    num_ranks: int
    device: str
    step_time_s: float
    """Geometric mean over windows of the median step."""
    tokens_per_s: float | None
    """Tokens/s of all ranks; None if the run's config is unknown."""
    slow: str
    """Stragglers or slow links in its newest window, in words; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermChange(Encoded):
    """One term of both runs, seconds per step or per 1,000 tokens."""

    name: str
    first_s: float
    second_s: float
    change: Change

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(
            term=self.name,
            first_s=self.first_s,
            second_s=self.second_s,
            change_s=self.change.value,
            low_s=self.change.low,
            high_s=self.change.high,
            is_shown=self.change.is_shown,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Encoded):
    """Comparison of a second run with a first."""

    schema: ClassVar[int] = SCHEMA

    first: Side
    second: Side
    settings: tuple[SettingChange, ...]
    basis: Basis
    reason: str
    """Reason why they cannot be compared; empty if they can."""
    step: Change
    """Change of the log time per token; per step if tokens are unknown."""
    terms: tuple[TermChange, ...]
    """Changes of terms; they add up to the step, ``ALL_ELSE`` last."""
    per_tokens: int
    """Number of tokens that the terms' seconds are for; 0 for one step."""
    ranks: tuple[TermChange, ...]
    """Significant changes of work and waiting of single ranks."""
    causes: tuple[Cause, ...]

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(
            schema=self.schema,
            verdict=self.verdict,
            basis=self.basis,
            sentence=self.sentence,
            reason=self.reason,
            first=self.first,
            second=self.second,
            settings=self.settings,
            **self.fracs,
            chance=self.step.chance,
            per_tokens=self.per_tokens,
            terms=self.terms,
            ranks=self.ranks,
            causes=self.causes,
        )

    @property
    def verdict(self) -> Verdict:
        """The verdict on the second run."""
        if self.reason:
            return Verdict.NOT_COMPARABLE
        if not self.step.is_shown:
            return Verdict.NO_DIFFERENCE
        return Verdict.SLOWER if self.step.value > 0 else Verdict.FASTER

    def is_slower_by(self, frac: float) -> bool:
        """Return True if the second is significantly slower, by more than ``frac`` of the first."""
        return self.verdict is Verdict.SLOWER and math.expm1(self.step.value) > frac

    @property
    def settings_text(self) -> str:
        """Settings that differ, the most relevant first; empty if there are none."""
        texts = [one.text for one in self.settings]
        more = f" and {len(texts) - 3} more settings" if len(texts) > 3 else ""
        return f"B has {', '.join(texts[:3])}{more}" if texts else ""

    @property
    def sentence(self) -> str:
        """The verdict in words, of B against A."""
        if self.reason:
            return f"not comparable: {self.reason}"
        if not self.step.is_shown:
            least = frac_text(self.step.least)
            return f"no difference that these runs could show (below {least}) in {self._of}"
        # Tokens/s are the inverse of time.
        sign = -1.0 if self.basis is Basis.THROUGHPUT else 1.0
        ends = sorted(abs(math.expm1(sign * end)) for end in (self.step.low, self.step.high))
        low, high = (f"{100 * end:.1f}" for end in ends)
        amount = frac_text(sign * self.step.value)
        return f"B is {self.verdict.value} by {amount} ({low} to {high}, 90 %) in {self._of}"

    @property
    def _of(self) -> str:
        return f"{self.basis.value}: {self._amount(self.first)} -> {self._amount(self.second)}"

    def _amount(self, side: Side) -> str:
        if self.basis is Basis.STEP_TIME or side.tokens_per_s is None:
            return format_time(side.step_time_s)
        return f"{side.tokens_per_s:,.0f}"

    @property
    def main(self) -> str:
        """Main causes or terms of a significant difference; empty if there is none."""
        if self.verdict not in (Verdict.SLOWER, Verdict.FASTER):
            return ""
        known = [cause.text for cause in self.causes if cause.kind is not CauseKind.UNKNOWN]
        if known:
            return "; ".join(known)
        sign = math.copysign(1.0, self.step.value)
        along = [t for t in self.terms if t.change.is_shown and t.change.value * sign > 0]
        along.sort(key=lambda term: -abs(term.change.value))
        return ", ".join(f"{t.name} {_signed(t.change.value)}" for t in along[:3])

    @property
    def fracs(self) -> dict[str, float]:
        """Difference of the steps, its interval and the smallest significant one, as shares."""
        names = {
            "time_frac": "value",
            "low_frac": "low",
            "high_frac": "high",
            "least_frac": "least",
        }
        return {key: math.expm1(getattr(self.step, name)) for key, name in names.items()}


def _signed(time_s: float) -> str:
    return f"{'+' if time_s > 0 else '-'}{format_time(abs(time_s))}"
