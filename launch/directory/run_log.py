"""What the companion has seen of a run when it ends, and what the forecasts of it were worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...calib.errors import RecordError
from ...calib.forecast.evaluation import Coverage, Ended, Evaluation, StepTally, step_coverage
from .forecast_log import append_end, read_forecasts
from .publishing import Place
from .scoring import LoggedStep, Thinned

NUM_KEPT_POINTS = 2000
"""Steps that a chart shows at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One measured step and, where there was one, what was said of it before."""

    iteration: int
    time_s: float
    predicted_s: float | None = None
    """None: nothing; the same for the interval."""
    low_s: float | None = None
    high_s: float | None = None


class RunLog:
    """What the companion sees of a run while it goes on: steps, thinned, and its last moments."""

    def __init__(self) -> None:
        self._points = Thinned[StepPoint](NUM_KEPT_POINTS)
        self._tally = StepTally()
        self._last_step_unix_s = 0.0
        self._iteration = 0

    def add(self, row: LoggedStep, said: Mapping[str, float]) -> None:
        """A step has ended; ``said`` holds what was predicted of it, if anything was."""
        self._last_step_unix_s = row.unix_s or self._last_step_unix_s
        self._iteration = max(self._iteration, row.iteration)
        point = StepPoint(
            iteration=row.iteration,
            time_s=row.time_s,
            predicted_s=said.get("step_time_predicted_s"),
            low_s=said.get("step_time_predicted_low_s"),
            high_s=said.get("step_time_predicted_high_s"),
        )
        if row.flags:
            return
        if point.low_s is not None and point.high_s is not None:
            self._tally.add(point.time_s, point.low_s, point.high_s)
        self._points.add(point)

    @property
    def points(self) -> list[StepPoint]:
        """Steps without a flag, evenly spread over the run."""
        return self._points.kept

    @property
    def step_coverage(self) -> tuple[Coverage, ...]:
        """How often intervals of single steps have held so far."""
        return step_coverage([self._ended("", 0.0, 0)])

    def close(self, place: Place, end_unix_s: float) -> Evaluation | None:
        """Keep how the run ended; its forecasts against that, None where none was made."""
        try:
            made = read_forecasts(place.directory).made.get(place.run_id, ())
        except RecordError:
            return None
        if not made or not self._iteration:
            return None
        steps_total = made[-1].iteration + made[-1].steps_left
        append_end(place, self._ended(place.run_id, end_unix_s, steps_total))
        return read_forecasts(place.directory).track(place.run_id)

    def _ended(self, run_id: str, end_unix_s: float, steps_total: int) -> Ended:
        last_unix_s = self._last_step_unix_s or end_unix_s
        return Ended(
            run_id=run_id,
            last_step_unix_s=last_unix_s,
            end_unix_s=max(end_unix_s, last_unix_s),
            iteration=self._iteration,
            steps_total=steps_total,
            num_steps=self._tally.num_steps,
            num_inside=dict(self._tally.num_inside),
        )
