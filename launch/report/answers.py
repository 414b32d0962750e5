"""An answer as files: JSON for programs, Markdown for people, a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ... import __version__
from ...calib.answers import PREDICTED, Answer, Request, step_trace
from ...calib.forecast import Evaluation
from ...calib.records import OPEN, PRIVATE, with_iso_times, write_json
from ...calib.samples import SampleTable, write_table
from ...calib.timeline import MeasuredSpan
from ...hooks.process import FORECAST
from ..directory.forecast_log import FORECASTS, append_forecast
from ..directory.publishing import Place, write_each
from ..directory.run_folders import SAMPLES
from ..directory.run_log import STEPS, RunLog, write_steps
from .cells import typed_rows
from .page import PAGE, write_page
from .table import ReportTable

REQUEST = "request.json"
ANSWER = "answer.json"
DECISION = "decision.json"
SCORE = "score.json"
TRACE = "timeline.json.gz"
CREATED_BY = "forerun"
_PRIVATE = (REQUEST, ANSWER, DECISION)


def write_answer(
    place: Place,
    table: SampleTable,
    request: Request,
    answer: Answer,
    measured: Sequence[MeasuredSpan] = (),
    run_log: RunLog | None = None,
) -> None:
    """Write every artefact of the answer, each replaced at once.

    Those that can be made and written are, whatever becomes of the others; then
    ``UnwrittenError`` names these.
    """
    home = place.path
    made = {
        REQUEST: request.to_json,
        ANSWER: answer.to_json,
        FORECAST: answer.forecast_json,
        DECISION: answer.decision_json,
    }
    writes: dict[Path, Callable[[], object]] = {
        home / SAMPLES: lambda: write_table(home / SAMPLES, table),
        **{home / name: partial(_make, place, name, make) for name, make in made.items()},
    }
    if (modelled := answer.modelled) is not None:
        writes[home / TRACE] = lambda: write_json(
            home / TRACE, step_trace({PREDICTED: modelled.own}, measured, version=__version__)
        )
    if run_log is not None:
        writes[home / STEPS] = lambda: write_steps(place, run_log)
    writes[place.directory / FORECASTS] = lambda: append_forecast(place, answer)
    writes[home / PAGE] = lambda: write_page(place, table, answer, measured, run_log)
    write_each(writes.items())


def write_forecast(place: Place, answer: Answer) -> None:
    """Write a forecast that was made between windows."""
    write_each(
        [
            (place.path / FORECAST, lambda: _write(place, FORECAST, answer.forecast_json())),
            (place.directory / FORECASTS, lambda: append_forecast(place, answer)),
        ]
    )


def write_end(place: Place, answer: Answer) -> None:
    """Write again what the end of the run says more of: errors of the predicted finishes."""
    _make(place, ANSWER, answer.to_json)


def write_score(place: Place, score: Mapping[str, Any], track: Evaluation | None = None) -> None:
    """Write ``score.json``: what the predictions of a finished run were worth."""
    found = {} if track is None else {"track": track.to_json()}
    _write(place, SCORE, {"schema": 2, **score, **found})


def wandb_tables(tables: Sequence[ReportTable]) -> dict[str, list[dict[str, Any]]]:
    """Tables of the report as rows, keyed for sinks: numbers in place of their text."""
    return {table.key: typed_rows(table) for table in tables}


def window_values(answer: Answer) -> dict[str, float]:
    """For W&B, once a window has its answer: how well the one before predicted its step."""
    found = {}
    for score in answer.window_scores[-2:-1]:
        found["window_next_step_error_before_frac"] = score.next_before_frac
        found["window_next_step_error_after_frac"] = score.next_after_frac
    return {name: value for name, value in found.items() if value is not None}


def summary_values(answer: Answer) -> dict[str, float]:
    """For W&B, at the end: how windows did, and the throughput of the measured step.

    Of windows median absolute errors, before their refits and after, over those that have both.
    """
    scores = answer.window_scores
    pairs = {
        "next_step": [(one.next_before_frac, one.next_after_frac) for one in scores],
        "finish": [(one.finish_before_frac, one.finish_after_frac) for one in scores],
    }
    found: dict[str, float] = {}
    for name, held in pairs.items():
        both = [(abs(b), abs(a)) for b, a in held if b is not None and a is not None]
        if both:
            before, after = zip(*both, strict=True)
            found[f"windows_{name}_error_before_frac"] = median(before)
            found[f"windows_{name}_error_after_frac"] = median(after)
    return found | answer.rates


def _make(place: Place, name: str, make: Callable[[], Mapping[str, Any]]) -> None:
    _write(place, name, make())


def _write(place: Place, name: str, value: Mapping[str, Any]) -> None:
    """A JSON file with whose it is, for its owner alone where it may hold arguments."""
    whole = with_iso_times({"schema": 1, "created_by": CREATED_BY, **place.stamp(), **value})
    write_json(place.path / name, whole, mode=PRIVATE if name in _PRIVATE else OPEN)
