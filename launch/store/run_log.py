"""Companion's log of steps with their earlier predictions, and the score of these."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ...calib.answers.answer import Answer
from ...calib.forecast.adaptive import AdaptiveInterval
from ...calib.forecast.batch_ratios import PredictedStep
from ...calib.forecast.evaluation import Ended, Evaluation, evaluate, is_held
from ...calib.forecast.forecast_record import NOMINAL_FRAC
from ...calib.records.files import replace_by
from ...calib.records.run_values import TIME, hours_remaining, progress
from ...calib.units import format_frac
from .forecast_log import append_end, read_forecasts
from .place import Place
from .run_folders import finite_number, paths_of

if TYPE_CHECKING:
    import pandas as pd

_T = TypeVar("_T")
STEPS = "steps.parquet"
SCHEMA = 1
_SCHEMA_KEY, _RUN_KEY = b"forerun_schema", b"forerun_run_id"
MAX_WAITING_STEPS = 10_000
"""Maximum number of steps buffered until the first window's prediction."""
MAX_STORED_ERRORS = 4000
"""Maximum number of errors stored for medians."""
MAX_STORED_STEPS = 20_000
"""Maximum number of steps in ``steps.parquet``: half a megabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One step as reported by the training process, and as it was predicted."""

    iteration: int
    """The step's number as the host prints it, from 1."""
    time_s: float
    window: int = -1
    """Window of the step; -1 outside windows."""
    is_after_window: bool = False
    is_hooked: bool = False
    flags: tuple[str, ...] = ()
    unix_s: float = 0.0
    """End of the step."""
    is_disturbed: bool = False
    """True if the companion was computing at that time, on a processor that training may need."""
    predicted: PredictedStep | None = None
    """Earlier prediction; None if there was none."""

    @staticmethod
    def from_event(event: dict[str, Any]) -> LoggedStep:
        """Return the row of a ``step`` event."""
        window = event.get("window")
        return LoggedStep(
            iteration=int(event["step"]) + 1,
            time_s=float(event["time_s"]),
            window=-1 if window is None else window,
            is_after_window=bool(event.get("is_after_window")),
            is_hooked=bool(event.get("is_hooked")),
            flags=tuple(event.get("flags") or ()),
            unix_s=float(event.get("unix_s") or 0.0),
        )

    @property
    def columns(self) -> dict[str, Any]:
        """Row of ``steps.parquet``; what is not known is NaN."""
        predicted = self.predicted or _UNPREDICTED
        return {
            "iteration": self.iteration,
            "window": self.window,
            "unix_s": self.unix_s or math.nan,
            "step_time_s": self.time_s,
            "predicted_s": predicted.time_s,
            "low_s": predicted.low_s,
            "high_s": predicted.high_s,
            "is_hooked": self.is_hooked,
            "is_disturbed": self.is_disturbed,
            "flags": ",".join(self.flags),
        }


_UNPREDICTED = PredictedStep(time_s=math.nan, low_s=math.nan, high_s=math.nan)
_COLUMNS = [*LoggedStep(iteration=0, time_s=0.0).columns]


class ThinnedValues(Generic[_T]):
    """Evenly spaced sample of a stream, of at most ``most`` values."""

    def __init__(self, most: int) -> None:
        self.values: list[_T] = []
        self._most, self._every, self._num_seen = most, 1, 0

    def add(self, value: _T) -> None:
        """Add a value; of many, only every second, fourth and so on is stored."""
        if self._num_seen % self._every == 0:
            self.values.append(value)
        self._num_seen += 1
        if len(self.values) > self._most:
            self.values = self.values[::2]
            self._every *= 2


@dataclass(slots=True)
class Score:
    """Signed errors of the predicted step, and coverage of its intervals."""

    num_scored: int = 0
    num_inside: dict[str, int] = field(
        default_factory=lambda: {str(share): 0 for share in NOMINAL_FRAC}
    )
    """Number of steps within each nominal interval."""
    errors_frac: ThinnedValues[float] = field(
        default_factory=lambda: ThinnedValues(MAX_STORED_ERRORS)
    )

    def add(self, time_s: float, predicted: PredictedStep) -> None:
        """Score a step."""
        self.num_scored += 1
        self.errors_frac.add(predicted.error_frac(time_s))
        for share, is_inside in is_held(time_s, predicted.low_s, predicted.high_s).items():
            self.num_inside[share] += is_inside

    def summary(self) -> dict[str, Any]:
        """Return the score as a mapping; empty before the first scored step."""
        if not self.num_scored:
            return {}
        return {
            "num_scored_steps": self.num_scored,
            "step_time_error_median_frac": median(self.errors_frac.values),
            "step_time_abs_error_median_frac": median(abs(e) for e in self.errors_frac.values),
            "interval_coverage_frac": self.num_inside["0.9"] / self.num_scored,
        }


def _predicted(
    answer: Answer, iteration: int, interval: tuple[float, float] | None
) -> PredictedStep:
    """Return the prediction of a step.

    ``interval`` is derived from the preceding steps, if there are enough.  The answer's value is
    older than these steps, so it is clamped to the interval.
    """
    predicted = answer.predicted_step(iteration)
    if interval is None:
        return predicted
    low_s, high_s = interval
    time_s = min(max(predicted.time_s, low_s), high_s)
    return PredictedStep(time_s=time_s, low_s=low_s, high_s=high_s)


def _predicted_values(
    row: LoggedStep, predicted: PredictedStep, answer: Answer
) -> dict[str, float]:
    """Return the values to log of a predicted step."""
    values = {
        "step_time_predicted_s": predicted.time_s,
        "step_time_predicted_low_s": predicted.low_s,
        "step_time_predicted_high_s": predicted.high_s,
        "step_time_error_frac": predicted.error_frac(row.time_s),
        "is_in_interval": float(predicted.low_s <= row.time_s <= predicted.high_s),
        **answer.rates_of(row.time_s, row.iteration),
    }
    if answer.modelled is not None:
        values["step_time_modelled_s"] = answer.modelled.step_at(row.iteration).time_s
    if answer.has_finish:
        values["finish_p50_unix_s"] = answer.forecast.finish_p50_unix_s
        values["finish_p95_unix_s"] = answer.forecast.finish_p95_unix_s
        if row.unix_s:
            values["eta_h"] = hours_remaining(answer.forecast.finish_p50_unix_s, row.unix_s)
    if (overhead := answer.measured.overhead) is not None:
        values |= overhead.values
    return values | answer.decision_values


def score_line(summary: Mapping[str, Any]) -> str:
    """Return a log line on the accuracy of step predictions; empty if no step was scored."""
    num_steps = finite_number(summary.get("num_scored_steps"))
    if not num_steps:
        return ""
    error_frac = finite_number(summary.get("step_time_error_median_frac"))
    side = "long" if error_frac >= 0 else "short"
    coverage = format_frac(finite_number(summary.get("interval_coverage_frac")))
    return (
        f"scored: steps were predicted {format_frac(abs(error_frac))} too {side} in the median "
        f"of {num_steps:.0f}; their 90 % intervals contained {coverage} of them"
    )


class RunLog:
    """Takes steps in order; buffers those after the first window until its prediction.

    ``log`` gets the values of each step.  The score, a thinned sample of steps and the time of the
    last one are stored.
    """

    def __init__(self, log: Callable[[int, Mapping[str, float]], None]) -> None:
        self.score = Score()
        self.is_first_open = True
        """True until the first window is answered."""
        self.size_ends: tuple[int, ...] = ()
        """Last iteration of each batch size."""
        self.num_steps = 0
        """Steps of the whole run; 0 if unknown."""
        self._log = log
        self._waiting: deque[LoggedStep] = deque()
        self._next_step = AdaptiveInterval()
        self._seen = ThinnedValues[LoggedStep](MAX_STORED_STEPS)
        self._last_step_unix_s = 0.0
        self._iteration = 0

    def add(self, row: LoggedStep) -> None:
        """Buffer a step until ``flush``."""
        self._waiting.append(row)

    @property
    def next_iteration(self) -> int | None:
        """First buffered iteration, before which nothing may be logged; None if none is
        buffered."""
        return self._waiting[0].iteration if self._waiting else None

    def flush(
        self,
        answer: Answer | None,
        level: Callable[[], Mapping[str, float]],
        *,
        is_final: bool = False,
        is_live: bool = False,
    ) -> None:
        """Log buffered steps in order, with the prediction of ``answer`` and the current
        ``level``."""
        while self._waiting:
            row = self._waiting[0]
            is_waiting = row.is_after_window and self.is_first_open and not is_final
            if is_waiting and len(self._waiting) <= MAX_WAITING_STEPS:
                return
            self._waiting.popleft()
            values = {"step_time_s": row.time_s, **progress(row.iteration, self.num_steps)}
            if row.unix_s:
                values[TIME] = row.unix_s
            if row.is_after_window and answer is not None:
                interval = self._next_step.interval() if is_live else None
                predicted = _predicted(answer, row.iteration, interval)
                row = replace(row, predicted=predicted)
                values |= _predicted_values(row, predicted, answer)
            values |= level()
            self._keep(row)
            if not row.flags and not row.is_hooked:
                self._next_step.add(row.time_s)
            if row.iteration in self.size_ends:
                self._next_step = AdaptiveInterval()
            self._log(row.iteration, values)

    def _keep(self, row: LoggedStep) -> None:
        self._last_step_unix_s = row.unix_s or self._last_step_unix_s
        self._iteration = max(self._iteration, row.iteration)
        self._seen.add(row)
        if row.predicted is not None and not row.flags:
            self.score.add(row.time_s, row.predicted)

    @property
    def seen(self) -> list[LoggedStep]:
        """All steps; of many, an evenly spaced sample."""
        return self._seen.values

    def close(self, place: Place, end_unix_s: float) -> Evaluation | None:
        """Log the run's end and return the evaluation of its forecasts; None if none was made."""
        made = read_forecasts(place.directory).made.get(place.run_id, ())
        if not made or not self._iteration:
            return None
        steps_total = made[-1].steps_done + made[-1].steps_left
        ended = self.ended(place.run_id, end_unix_s, steps_total)
        append_end(place, ended)
        return evaluate(made, ended)

    def ended(self, run_id: str, end_unix_s: float, steps_total: int) -> Ended:
        """Return the end of a run of that length, 0 if unknown, after the steps so far."""
        last_unix_s = self._last_step_unix_s or end_unix_s
        return Ended(
            run_id=run_id,
            last_step_unix_s=last_unix_s,
            end_unix_s=max(end_unix_s, last_unix_s),
            iteration=self._iteration,
            steps_total=steps_total,
            num_steps=self.score.num_scored,
            num_inside=dict(self.score.num_inside),
        )


def write_steps(place: Place, run_log: RunLog) -> None:
    """Replace the step file atomically; a long run has an evenly spaced sample of steps."""
    import pyarrow as pa  # slow to import
    import pyarrow.parquet as pq

    rows = [one.columns for one in run_log.seen]
    columns = {name: [row[name] for row in rows] for name in _COLUMNS}
    whole = pa.table(columns).replace_schema_metadata(
        {_SCHEMA_KEY: str(SCHEMA).encode(), _RUN_KEY: place.run_id.encode()}
    )
    replace_by(place.path / STEPS, lambda file: pq.write_table(whole, file, compression="zstd"))


def read_steps(directory: Path, run_id: str) -> pd.DataFrame | None:
    """Read the steps of a run, one column per key of ``LoggedStep.columns``.

    None if there is no file; files that are damaged, of a newer schema or of another run are
    skipped.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ...calib.samples.store import check_parquet

    for path in paths_of(directory, STEPS):
        try:
            check_parquet(path)
            whole = pq.read_table(path)
            metadata = whole.schema.metadata or {}
            if metadata.get(_RUN_KEY) != run_id.encode() or int(metadata[_SCHEMA_KEY]) > SCHEMA:
                continue
            return whole.select(_COLUMNS).to_pandas(ignore_metadata=True)
        except (OSError, ValueError, LookupError, TypeError, pa.ArrowException):
            continue
    return None
