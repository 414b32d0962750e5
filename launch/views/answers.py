"""Answer files: JSON for programs, HTML for people, a trace for Perfetto."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ... import __version__
from ...calib.advice.planning import Plan
from ...calib.answers.answer import Answer
from ...calib.answers.finish_line import duration_s, ended_text
from ...calib.answers.request import Request
from ...calib.answers.step_traces import PREDICTED, step_trace
from ...calib.answers.transcript import PREFIX, run_line
from ...calib.forecast.evaluation import Evaluation
from ...calib.forecast.forecast_record import Forecast
from ...calib.records.files import CREATED, OPEN, PRIVATE, write_json, write_text
from ...calib.records.iso_times import format_moment, with_iso_times
from ...calib.samples.store import write_table
from ...calib.shell import printable_lines, quoted
from ...calib.timeline.items import MeasuredSpan
from ...calib.units import format_count, format_frac, format_time
from ...hooks.process.host_wandb import FORECAST
from ...leaves import leaf
from ..store.forecast_log import append_forecast, read_forecasts
from ..store.place import FORECASTS, Place, write_each
from ..store.run_folders import DECISION, SAMPLES
from ..store.run_log import STEPS, LoggedStep, RunLog, write_steps
from ..views._canvas import CHART, schemes
from ..views.charts import figures
from .answer_tables import (
    NUM_LAYOUTS,
    forecast_tables,
    notes_of,
    tables_of,
)

REQUEST = "request.json"
ANSWER = "answer.json"
SCORE = "score.json"
TRACE = "timeline.json.gz"
_PRIVATE = (REQUEST, ANSWER, DECISION)


def write_answer(
    place: Place,
    request: Request,
    answer: Answer,
    measured: Sequence[MeasuredSpan] = (),
    run_log: RunLog | None = None,
) -> None:
    """Write all files of the answer, each replaced atomically.

    A failure does not stop the others; ``UnwrittenError`` lists the failed files at the end.
    """
    home = place.path
    made = {
        REQUEST: request.to_json,
        ANSWER: answer.to_json,
        FORECAST: answer.forecast_json,
        DECISION: answer.decision_json,
    }
    writes: dict[Path, Callable[[], object]] = {
        home / SAMPLES: lambda: write_table(home / SAMPLES, answer.measured.table),
        **{home / name: partial(_make, place, name, make) for name, make in made.items()},
    }
    if (modelled := answer.modelled) is not None:
        writes[home / TRACE] = lambda: write_json(
            home / TRACE,
            step_trace(
                {PREDICTED: modelled.model_forecast.running_estimate},
                measured,
                version=__version__,
            ),
        )
    if run_log is not None:
        writes[home / STEPS] = lambda: write_steps(place, run_log)
    writes[place.directory / FORECASTS] = lambda: append_forecast(place, answer)
    writes[home / PAGE] = lambda: write_page(place, answer, run_log)
    write_each(writes.items())


def write_forecast(place: Place, answer: Answer) -> None:
    """Write a forecast made between windows."""
    write_each(
        [
            (place.path / FORECAST, lambda: _write(place, FORECAST, answer.forecast_json())),
            (place.directory / FORECASTS, lambda: append_forecast(place, answer)),
        ]
    )


def write_end(place: Place, answer: Answer) -> None:
    """Rewrite the answer after the end of the run, with errors of the predicted finishes."""
    _make(place, ANSWER, answer.to_json)


def write_score(place: Place, score: Mapping[str, Any], track: Evaluation | None = None) -> None:
    """Write ``score.json``, the score of a finished run's predictions."""
    track_json = {} if track is None else {"track": track.to_json()}
    _write(place, SCORE, {"schema": 2, **score, **track_json})


def _make(place: Place, name: str, make: Callable[[], Mapping[str, Any]]) -> None:
    _write(place, name, make())


def _write(place: Place, name: str, value: Mapping[str, Any]) -> None:
    """Write a JSON file with the run's ids, readable only by its owner if it may hold arguments."""
    whole = with_iso_times({"schema": 1, **CREATED, **place.stamp(), **value})
    write_json(place.path / name, whole, mode=PRIVATE if name in _PRIVATE else OPEN)


PAGE = "report.html"
_MOST_CHARACTERS = 98
"""Longest table row that fits the page, in characters."""
_SHOW_SECONDS_BELOW_S = 1800.0
"""Ends of shorter runs are shown with seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Content of the report page."""

    answer: Answer
    notes: Sequence[str] = ()
    steps: Sequence[LoggedStep] = ()
    made: Sequence[Forecast] = ()
    track: Evaluation | None = None
    """Evaluation of forecasts, once the run has ended."""
    end_unix_s: float | None = None


def write_page(place: Place, answer: Answer, run_log: RunLog | None = None) -> None:
    """Replace ``report.html``.

    Forecasts and the end are read from ``forecasts.jsonl`` at the top level.  ``run_log`` is the
    companion's log; without it, the steps of windows are shown.
    """
    page = page_of(place.directory, answer, run_log)
    write_text(place.path / PAGE, render(page, directory=str(place.directory)))


def page_of(directory: Path, answer: Answer, run_log: RunLog | None = None) -> Page:
    """Return the content of an answer's page."""
    logged, run_id = read_forecasts(directory), answer.measured.run_id
    problems = tuple(dict.fromkeys((*answer.problems, *logged.problems)))
    ended = logged.ended.get(run_id)
    steps = [row for row in run_log.seen if not row.flags] if run_log else []
    return Page(
        answer=answer,
        notes=notes_of(replace(answer, problems=problems)),
        steps=steps or _window_steps(answer),
        made=logged.made.get(run_id, ()),
        track=logged.track(run_id),
        end_unix_s=ended.end_unix_s if ended is not None and ended.is_complete else None,
    )


def render(page: Page, *, directory: str = "DIR") -> str:
    """Return the page as HTML; ``directory`` is the one in its commands."""
    modelled = page.answer.modelled
    plan = None if modelled is None else modelled.plan
    rows = () if plan is None else plan.candidates[:NUM_LAYOUTS]
    section = leaf(".what_if:section", __package__ or "")
    what_if = section(modelled.what_if, directory) if section and modelled is not None else None
    script = Markup(what_if["script"] if what_if else "")
    tables = [*tables_of(page.answer), *forecast_tables(page.track)]
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable_lines(value) if type(value) is str else value,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    return environment.from_string(_text(PAGE)).render(
        what_if=what_if,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        card=_card(page, directory),
        score=page.track.line if page.track is not None else "",
        tables={one.key: one.fit_to_width(_MOST_CHARACTERS) for one in tables},
        advised=next((n for n, row in enumerate(rows, 1) if plan and row is plan.best), None),
        misses=[f"{row.label}: {why}" for row in rows if plan and (why := plan.obstacle(row))],
        figures=figures(page.answer, page.steps, page.made, page.end_unix_s),
        inline=lambda drawing, key: Markup(drawing.inline(key)),
        notes=page.notes,
        lines=page.answer.transcript,
        schemes=Markup(schemes(":root")),
        chart_style=Markup(CHART),
        style=Markup(_text("report.css")),
    )


def _text(name: str) -> str:
    home = resources.files(__package__ or "forerun.launch.views").joinpath("templates")
    return home.joinpath(name).read_text(encoding="utf-8")


def _window_steps(answer: Answer) -> list[LoggedStep]:
    """Return clean steps of windows without hooks, of the first rank that has them."""
    run_steps = answer.measured.clean_steps
    run_steps = run_steps[~run_steps["is_hooked"]]
    run_steps = run_steps[run_steps["rank"] == run_steps["rank"].min()]
    numbers = (int(step) + 1 for step in run_steps["step"])
    return [
        LoggedStep(iteration=n, time_s=float(time_s), predicted=answer.predicted_step(n))
        for n, time_s in zip(numbers, run_steps["time_s"], strict=True)
    ]


def _card(page: Page, directory: str) -> dict[str, Any]:
    """Return the head of the page: end of the run, current rate, possible gain, and the next
    command."""
    answer = page.answer
    modelled, ahead, measured = answer.modelled, answer.forecast, answer.measured
    headline, within = _ending(answer)
    about, command = {"device": measured.device}, f"forerun report {quoted(directory)}"
    if modelled is None:
        rates = list(answer.rates.items())[:1]
        facts = [f"{format_count(rate)} {name.partition('_')[0]}/s" for name, rate in rates]
        run = run_line(None, measured.run.num_ranks, measured.step_s, device=measured.device)
    else:
        config, plan = modelled.config, modelled.plan
        throughput = modelled.throughput(measured.step_s)
        rate = f"{format_count(throughput.tokens_per_s)} tokens/s"
        if throughput.mfu_frac is not None:
            rate = f"{format_frac(throughput.mfu_frac)} MFU"
        facts = [rate, *_gain(answer, plan)]
        run = run_line(config, config.parallelism.num_ranks, measured.step_s)
        about = {"device": config.device, "framework": config.framework}
        row = "" if plan.best is None else f" --show {plan.candidates.index(plan.best) + 1}"
        command = f"forerun plan {quoted(directory)}{row}"
    made = f"{format_moment(ahead.now_unix_s, 0.0)}, step {ahead.steps_done:,}"
    return {
        "headline": headline,
        "within": within,
        "facts": facts,
        "run": run,
        "slow": "" if modelled is None else measured.waiting.line,
        # The page shows the command of this line separately.
        "advice": answer.advice.removeprefix(PREFIX).partition(" · ")[0].strip(),
        "command": command,
        "about": {"run": measured.run_id, "as of": made, **about, "forerun": __version__}.items(),
    }


def _ending(answer: Answer) -> tuple[str, str]:
    ahead = answer.forecast
    has_seconds = ahead.total_s < _SHOW_SECONDS_BELOW_S
    if (ended := answer.ended) is not None:
        text = ended_text(ended, has_seconds=has_seconds)
        return text[0].upper() + text[1:], f"{format_time(duration_s(ended, ahead))} in all"
    if not answer.has_finish:
        return f"{format_time(answer.measured.step_s)} per step", "end of the run not known"
    now = ahead.now_unix_s
    low, high = (
        format_moment(now + remaining_s, now, has_seconds=has_seconds).removesuffix(" UTC")
        for remaining_s in (ahead.remaining_low_s, ahead.remaining_high_s)
    )
    end = format_moment(ahead.finish_p50_unix_s, now, has_seconds=has_seconds)
    return f"Ends {end}", f"90 %: {low} to {high}"


def _gain(answer: Answer, plan: Plan) -> Iterator[str]:
    best, remaining_run = plan.best, answer.remaining_run
    if plan.doubt and (best is None or best.is_unsure):
        yield "the model cannot rank layouts"
        return
    if best is None and (coded := plan.by_code) is not None:
        yield f"{format_frac(-coded.time_frac)} less per step by a change of the code"
        return
    if best is None:
        yield "nothing faster to offer"
        return
    if best.is_unsure:
        yield "nothing is surely faster"
        return
    yield f"{format_frac(-best.time_frac)} less per step available"
    if remaining_run is None or answer.ended is not None:
        return
    running = remaining_run.in_layout(plan.running.config, plan.running.step_time_s)
    other = remaining_run.in_layout(best.config, best.step_time_s)
    saved = running.gpu_hours - other.gpu_hours
    if saved > 0 and answer.measured.device != "cpu":
        yield f"saves {format_count(saved)} GPU-hours"
    elif running.remaining_s > other.remaining_s:
        yield f"saves {format_time(running.remaining_s - other.remaining_s)}"
