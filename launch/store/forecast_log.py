"""Forecast log of runs, ``forecasts.jsonl``: a line per forecast and one for the run's end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...calib.errors import RecordError
from ...calib.forecast.evaluation import Ended, Evaluation, PastForecast, evaluate
from ...calib.records.files import append_line, read_lines
from ...calib.records.iso_times import with_iso_times
from ...calib.units import format_frac
from ...calib.workload.run_options import Goals
from .publishing import FORECAST, Place, forecasts_path
from .run_folders import newest_of_run

if TYPE_CHECKING:
    from ...calib.answers.answer import Answer
    from ...calib.forecast.rates import RemainingRun
    from ...calib.workload.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Forecasts and ends of the runs of a directory."""

    made: Mapping[str, tuple[PastForecast, ...]]
    """Forecasts by run, oldest first."""
    ended: Mapping[str, Ended]
    problems: tuple[str, ...]

    def track(self, run_id: str) -> Evaluation | None:
        """Return the evaluation of a finished run's forecasts; None if the run has not ended."""
        ended = self.ended.get(run_id)
        return evaluate(self.made.get(run_id, ()), ended) if ended is not None else None


def append_forecast(place: Place, answer: Answer) -> None:
    """Append the forecast of an answer; called whenever ``forecast.json`` is written.

    Nothing is appended if the forecast has no finish.
    """
    if answer.has_finish:
        _append(place, PastForecast.of(answer.forecast, answer.measured.run_id).to_json())


def append_end(place: Place, ended: Ended) -> None:
    """Append the end of a run."""
    _append(place, ended.to_json())


def _append(place: Place, value: Mapping[str, Any]) -> None:
    append_line(forecasts_path(place.directory), with_iso_times({**value, **place.stamp()}))


def read_forecasts(directory: Path) -> Logged:
    """Read all forecasts and ends of a directory; none if the file is missing.  An unreadable file,
    and each damaged or foreign line, is a problem."""
    path = forecasts_path(directory)
    try:
        values, problems = read_lines(path) if path.exists() else ([], ())
    except RecordError as err:
        values, problems = [], (str(err),)
    made: dict[str, list[PastForecast]] = {}
    ended: dict[str, Ended] = {}
    skipped = list(problems)
    for value in values:
        try:
            if value.get("kind") == "forecast":
                past_forecast = PastForecast.from_json(value)
                made.setdefault(past_forecast.run_id, []).append(past_forecast)
            elif value.get("kind") == "end":
                end = Ended.from_json(value)
                ended[end.run_id] = end
            else:
                skipped.append(f"{path.name}: kind {value.get('kind')!r} is not known, skipped")
        except (RecordError, KeyError, TypeError, ValueError) as err:
            skipped.append(f"{path.name}: {err}")
    return Logged(
        made={run_id: tuple(rows) for run_id, rows in made.items()},
        ended=ended,
        problems=tuple(skipped),
    )


def finish_line(evaluation: Evaluation) -> str:
    """Return a log line on the error of the predicted finish; empty without a forecast.

    The first forecast counts, since users plan with it.
    """
    first = evaluation.first
    if first is None:
        return ""
    side = "late" if first.of_total_frac >= 0 else "early"
    words = [
        f"scored: the finish was predicted {format_frac(abs(first.of_total_frac))} of the run too "
        f"{side} after {first.iteration} steps"
    ]
    tight = evaluation.settled[-1]
    if tight.stays_from_iteration is not None and evaluation.num_forecasts > 1:
        share = format_frac(tight.within_frac)
        words.append(f"within {share} of it from step {tight.stays_from_iteration} on")
    inside = next(row for row in evaluation.finish if row.nominal_frac == 0.9)
    words.append(f"{inside.num_inside} of {inside.num} 90 % intervals contained the finish")
    return " · ".join(words)


def read_remaining_run(
    directory: Path,
    run_id: str,
    running: RunConfig,
    step_time_s: float | None = None,
    *,
    price_per_gpu_hour: float | None = None,
) -> RemainingRun | None:
    """Return the remainder of a run whose running layout takes ``step_time_s`` in the caller's plan
    (None: as in the forecast).

    None if the directory has no forecast of that run, or no steps remain.  Price and restart cost
    are those stated for the run, unless a price is given here.
    """
    from ...calib.forecast.rates import RemainingRun  # slow to import

    newest = newest_of_run(directory, FORECAST, run_id)
    remaining = None if newest is None else RemainingRun.from_forecast(newest, running, step_time_s)
    if remaining is None:
        return None
    request = newest_of_run(directory, "request.json", run_id) or {}
    request_price, restart_s = request.get("price_per_gpu_hour"), request.get("restart_cost_s")
    price = request_price if price_per_gpu_hour is None else price_per_gpu_hour
    return replace(
        remaining,
        price_per_gpu_hour=float(price) if isinstance(price, int | float) else None,
        restart_s=float(restart_s) if isinstance(restart_s, int | float) else Goals.restart_cost_s,
    )
