"""``report.html``: the report as one page that needs no network; plotly draws its charts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ...calib.answers.analysis import Answer
from ...calib.errors import RecordError
from ...calib.forecast.evaluation import step_coverage
from ...calib.samples.store import write_text
from ...calib.samples.table import SampleTable
from ...calib.timeline.measured import MeasuredSpan
from ..directory.forecast_log import Logged, finish_line, read_forecasts
from ..directory.publishing import Place
from ..directory.run_log import NUM_KEPT_POINTS, RunLog, StepPoint
from .charts import Figure, Page, charts
from .run_tables import notes, report_tables

PAGE = "report.html"


def write_page(
    place: Place,
    table: SampleTable,
    answer: Answer,
    measured: Sequence[MeasuredSpan] = (),
    run_log: RunLog | None = None,
) -> None:
    """Replace ``report.html``; forecasts and the end come from ``forecasts.jsonl`` at the top.

    ``run_log`` is what the companion saw of the run; without it the steps of the windows are shown.
    """
    page = page_of(place.directory, table, answer, measured, run_log)
    write_text(place.path / PAGE, render(page))


def page_of(
    directory: Path,
    table: SampleTable,
    answer: Answer,
    measured: Sequence[MeasuredSpan] = (),
    run_log: RunLog | None = None,
) -> Page:
    """What the page of an answer shows."""
    try:
        logged = read_forecasts(directory)
    except RecordError:
        logged = Logged(made={}, ended={}, problems=())
    track, ended = logged.track(answer.run_id), logged.ended.get(answer.run_id)
    seen = run_log.step_coverage if run_log else ()
    if run_log is None and ended is not None:
        seen = step_coverage(ended)
    return Page(
        answer=answer,
        tables=report_tables(answer),
        notes=(*notes(answer), *logged.problems),
        steps=run_log.points if run_log and run_log.points else _window_steps(table, answer),
        made=logged.made.get(answer.run_id, ()),
        step_coverage=seen,
        track=track,
        end_unix_s=ended.end_unix_s if ended is not None and ended.is_complete else None,
        operators=answer.calibration.left_out_times(),
        spans=measured,
    )


def render(page: Page) -> str:
    """The page as text: tables by the template, charts as data for plotly, plotly itself once."""
    # Of use here alone, and slow to import.
    from plotly.offline import get_plotlyjs

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    home = resources.files(__package__ or "forerun.launch.report")
    source = home.joinpath("templates").joinpath(PAGE).read_text(encoding="utf-8")
    drawn = charts(page)
    return environment.from_string(source).render(
        answer=page.answer,
        score=finish_line(page.track) if page.track is not None else "",
        tables=page.tables,
        notes=page.notes,
        charts=[(f"chart-{place}", title) for place, (title, _) in enumerate(drawn)],
        figures=_script_json([figure for _, figure in drawn]),
        plotly=Markup(get_plotlyjs()),
    )


def _window_steps(table: SampleTable, answer: Answer) -> list[StepPoint]:
    """Bare clean steps of the windows, of the first rank that has them."""
    steps = table.steps
    own = steps[(steps["run_id"] == answer.run_id) & steps["is_clean"] & ~steps["is_hooked"]]
    own = own[own["rank"] == own["rank"].min()].tail(NUM_KEPT_POINTS)
    points = []
    for step, time_s, gap_s in zip(own["step"], own["time_s"], own["gap_s"], strict=True):
        said = answer.predicted_step(int(step) + 1)
        points.append(
            StepPoint(
                iteration=int(step) + 1,
                time_s=float(time_s + gap_s),
                predicted_s=said.time_s,
                low_s=said.low_s,
                high_s=said.high_s,
            )
        )
    return points


def _script_json(figures: Sequence[Figure]) -> Markup:
    """JSON that cannot end the script that it stands in."""
    text = json.dumps(figures, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)
