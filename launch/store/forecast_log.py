"""Forecasts of a run: ``forecasts.jsonl``, a line for each and one for the end, and the newest."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...calib.errors import RecordError
from ...calib.forecast import Ended, Evaluation, PastForecast, evaluate
from ...calib.records import append_line, read_lines, with_iso_times
from ...calib.units import format_frac
from ...calib.workload import Goals
from .publishing import FORECAST, Place
from .run_folders import newest_of_run

if TYPE_CHECKING:
    from ...calib.answers import Answer
    from ...calib.forecast import RemainingRun
    from ...calib.workload import RunConfig


FORECASTS = "forecasts.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """What a directory knows of the forecasts of its runs."""

    made: Mapping[str, tuple[PastForecast, ...]]
    """By run, oldest first."""
    ended: Mapping[str, Ended]
    problems: tuple[str, ...]

    def track(self, run_id: str) -> Evaluation | None:
        """The forecasts of a run that has ended against its end."""
        ended = self.ended.get(run_id)
        return evaluate(self.made.get(run_id, ()), ended) if ended is not None else None


def append_forecast(place: Place, answer: Answer) -> None:
    """Keep the forecast of an answer; called wherever ``forecast.json`` is written.

    Nothing is kept where the end of the run is not known.
    """
    if answer.has_finish:
        _append(place, PastForecast.of(answer.forecast, answer.run_id).to_json())


def append_end(place: Place, ended: Ended) -> None:
    """Keep how a run ended."""
    _append(place, ended.to_json())


def _append(place: Place, value: Mapping[str, Any]) -> None:
    append_line(place.directory / FORECASTS, with_iso_times({**value, **place.stamp()}))


def read_forecasts(directory: Path) -> Logged:
    """All forecasts and ends of a directory; what is damaged or foreign is named and skipped.

    ``RecordError`` where there is no such file.
    """
    values, problems = read_lines(directory / FORECASTS)
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
                skipped.append(f"{FORECASTS}: kind {value.get('kind')!r} is not known, skipped")
        except (RecordError, KeyError, TypeError, ValueError) as err:
            skipped.append(f"{FORECASTS}: {err}")
    return Logged(
        made={run_id: tuple(rows) for run_id, rows in made.items()},
        ended=ended,
        problems=tuple(skipped),
    )


def end_of_run(directory: Path, run_id: str) -> float | None:
    """When a run came to its end, Unix seconds; None where it has not, or nobody wrote it down."""
    ended = None
    with suppress(RecordError):
        ended = read_forecasts(directory).ended.get(run_id)
    return ended.end_unix_s if ended is not None and ended.is_complete else None


def forecasts_of(directory: Path, run_id: str) -> tuple[PastForecast, ...]:
    """The forecasts of a run, oldest first; none where nobody wrote any down."""
    with suppress(RecordError):
        return read_forecasts(directory).made.get(run_id, ())
    return ()


def finish_line(evaluation: Evaluation) -> str:
    """How well the finish was predicted, as the last line of a log; empty without an answer.

    The first forecast counts: it is the one that a user plans with.
    """
    first = evaluation.first
    if first is None:
        return ""
    side = "late" if first.of_total_frac >= 0 else "early"
    words = [
        f"scored: the end was predicted {format_frac(abs(first.of_total_frac))} of the run too "
        f"{side} after {first.iteration} steps"
    ]
    tight = evaluation.settled[-1]
    if tight.stays_from_iteration is not None and evaluation.num_forecasts > 1:
        share = format_frac(tight.within_frac)
        words.append(f"within {share} of it from step {tight.stays_from_iteration} on")
    inside = next(row for row in evaluation.finish if row.nominal_frac == 0.9)
    words.append(f"{inside.num_inside} of {inside.num} intervals of 90 % held the end")
    return " · ".join(words)


def read_remaining_run(
    directory: Path,
    run_id: str,
    running: RunConfig,
    step_time_s: float | None = None,
    *,
    price_per_gpu_hour: float | None = None,
) -> RemainingRun | None:
    """The rest of a run, whose running layout takes ``step_time_s`` in the plan that asks (None: as
    the forecast has it).

    None where the directory has no forecast of that run, or nothing is left.  Price and cost of a
    restart are those that the run was given, unless a price is given here.
    """
    from ...calib.forecast import RemainingRun  # slow to import

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
