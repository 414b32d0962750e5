"""Forecast log of runs, ``forecasts.jsonl``: a line per forecast and one for the run's end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...calib.errors import ForerunError, RecordError
from ...calib.forecast.evaluation import Ended, Evaluation, evaluate
from ...calib.forecast.forecast_record import LINE, SCHEMA, Forecast
from ...calib.records.files import append_line, read_lines
from ...calib.records.iso_times import with_iso_times
from ...calib.workload.config_json import decode
from ...calib.workload.run_options import Goals
from ...hooks.process.host_wandb import FORECAST
from .place import Place, forecasts_path
from .run_folders import decoded_or_empty, newest_of_run

if TYPE_CHECKING:
    from ...calib.answers.answer import Answer
    from ...calib.forecast.rates import RemainingRun
    from ...calib.workload.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Forecasts and ends of the runs of a directory."""

    made: Mapping[str, tuple[Forecast, ...]]
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
        _append(place, answer.forecast.to_line())


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
    made: dict[str, list[Forecast]] = {}
    ended: dict[str, Ended] = {}
    skipped = list(problems)
    for value in values:
        try:
            _add(value, made, ended)
        except KeyError as err:
            skipped.append(f"{path.name}: a line without {err}, skipped")
        except ForerunError as err:
            skipped.append(f"{path.name}: {err}")
    return Logged(
        made={run_id: tuple(rows) for run_id, rows in made.items()},
        ended=ended,
        problems=tuple(skipped),
    )


def _add(line: Mapping[str, Any], made: dict[str, list[Forecast]], ended: dict[str, Ended]) -> None:
    kind, schema = line.get("kind"), line.get("schema")
    if kind not in (LINE, Ended.kind):
        raise RecordError(f"kind {kind!r} is not known, skipped")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise RecordError(f"schema {schema!r}, this version reads up to {SCHEMA}; upgrade forerun")
    run_id = decode(str, line["run_id"])
    if kind == LINE:
        made.setdefault(run_id, []).append(Forecast.from_line(line))
    else:
        ended[run_id] = decode(Ended, line)


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
    remaining = RemainingRun.of(decoded_or_empty(Forecast, newest), running, step_time_s)
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
