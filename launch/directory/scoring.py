"""Predicted against actual, step by step: the tool scores itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Generic, TypeVar

from ...calib.answers.analysis import Answer
from ...calib.units import format_frac


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One step as the training process told it."""

    iteration: int
    """The step's number as the host prints it, from 1."""
    time_s: float
    window: int | None
    is_after_window: bool
    is_hooked: bool
    flags: tuple[str, ...]
    unix_s: float = 0.0
    """Its end."""
    is_disturbed: bool = False
    """This process was computing meanwhile, on a processor that training may need as well."""

    @staticmethod
    def from_event(event: dict[str, Any]) -> LoggedStep:
        """The row of a ``step`` event."""
        return LoggedStep(
            iteration=int(event["step"]) + 1,
            time_s=float(event["time_s"]),
            window=event.get("window"),
            is_after_window=bool(event.get("is_after_window")),
            is_hooked=bool(event.get("is_hooked")),
            flags=tuple(event.get("flags") or ()),
            unix_s=float(event.get("unix_s") or 0.0),
        )


_T = TypeVar("_T")
NUM_KEPT_ERRORS = 4000
"""Errors that a median is taken of at most."""


class Thinned(Generic[_T]):
    """At most so many of the values that came, evenly spread over them."""

    def __init__(self, most: int) -> None:
        self.kept: list[_T] = []
        self._most, self._every, self._num_seen = most, 1, 0

    def add(self, value: _T) -> None:
        """Keep it, or every second, fourth and so on where there are many."""
        if self._num_seen % self._every == 0:
            self.kept.append(value)
        self._num_seen += 1
        if len(self.kept) > self._most:
            self.kept = self.kept[::2]
            self._every *= 2


@dataclass(slots=True)
class Score:
    """Signed errors of the predicted step and how often the 90 % interval held."""

    num_scored: int = 0
    num_inside: int = 0
    errors_frac: Thinned[float] = field(default_factory=lambda: Thinned(NUM_KEPT_ERRORS))

    def add(
        self, row: LoggedStep, answer: Answer, interval: tuple[float, float] | None = None
    ) -> dict[str, float]:
        """Values to log for a step after the window; steps with flags do not count in the score.

        ``interval`` is what the steps before this one say, where there are enough of them.
        """
        predicted = answer.predicted_step(row.iteration)
        if interval is not None:
            predicted = replace(predicted, low_s=interval[0], high_s=interval[1])
        error_frac = predicted.time_s / row.time_s - 1.0
        inside = predicted.low_s <= row.time_s <= predicted.high_s
        if not row.flags:
            self._count(error_frac, is_inside=inside)
        values = {
            "step_time_predicted_s": predicted.time_s,
            "step_time_predicted_low_s": predicted.low_s,
            "step_time_predicted_high_s": predicted.high_s,
            "step_time_modelled_s": answer.modelled_at(row.iteration).time_s,
            "step_time_error_frac": error_frac,
            "is_in_interval": float(inside),
            "finish_p50_unix_s": answer.forecast.finish_p50_unix_s,
            "finish_p95_unix_s": answer.forecast.finish_p95_unix_s,
        }
        if answer.overhead is not None:
            values["overhead_frac"] = answer.overhead.overhead_frac
        return values

    def _count(self, error_frac: float, *, is_inside: bool) -> None:
        self.errors_frac.add(error_frac)
        self.num_scored += 1
        self.num_inside += is_inside

    def summary(self) -> dict[str, Any]:
        """What the predictions were worth; empty before the first."""
        if not self.num_scored:
            return {}
        return {
            "num_scored_steps": self.num_scored,
            "step_time_error_median_frac": median(self.errors_frac.kept),
            "step_time_abs_error_median_frac": median(abs(e) for e in self.errors_frac.kept),
            "interval_coverage_frac": self.num_inside / self.num_scored,
        }

    def lines(self) -> list[str]:
        """The score as text, for the end of the log."""
        summary = self.summary()
        if not summary:
            return []
        return [
            f"predicted against actual over {summary['num_scored_steps']} steps: median error "
            f"{format_frac(summary['step_time_error_median_frac'], signed=True)}, 90 % interval "
            f"held {format_frac(summary['interval_coverage_frac'])} of the time"
        ]
