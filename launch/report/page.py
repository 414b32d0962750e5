"""``report.html``: the report as one page that needs no network; without its script too."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from ... import __version__
from ...calib.answers import Answer, Modelled, predict_words
from ...calib.errors import RecordError
from ...calib.forecast import step_coverage
from ...calib.records import write_text
from ...calib.samples import SampleTable
from ...calib.shell import joined, quoted
from ...calib.timeline import MeasuredSpan
from ..directory.forecast_log import Logged, finish_line, read_forecasts
from ..directory.publishing import PICTURES, Place, write_each
from ..directory.run_log import NUM_KEPT_POINTS, RunLog, StepPoint
from ..drawing.canvas import Drawing
from ..drawing.style import CHART, schemes
from .card import card_of
from .figures import Figure, Page, figures
from .layout_tables import NUM_LAYOUTS, NUM_MENUS, what_if_rows, what_if_table
from .whole_report import markdown, notes_of, tables_of

PAGE, TEXT = "report.html", "report.md"
_MOST_CHARACTERS = 98
"""Of a row of a table, so that the page has room for it."""


def write_page(
    place: Place,
    table: SampleTable,
    answer: Answer,
    measured: Sequence[MeasuredSpan] = (),
    run_log: RunLog | None = None,
) -> None:
    """Replace ``report.html``, its charts as files, and ``report.md``, which shows them.

    Forecasts and the end come from ``forecasts.jsonl`` at the top.  ``run_log`` is what the
    companion saw of the run; without it the steps of the windows are shown.  Raises
    ``UnwrittenError`` once those that can be written are.
    """
    home, pictures = place.path, {}
    page = cache(lambda: page_of(place.directory, table, answer, measured, run_log))
    drawn = cache(lambda: figures(page()))

    def draw(key: str, name: str) -> None:
        if key in drawn():
            wide = drawn()[key].wide
            write_text(home / name, wide.alone())
            pictures[name] = wide.title, wide.text

    def whole() -> None:
        write_text(home / PAGE, render(page(), drawn(), directory=str(place.directory)))

    charts = [(home / name, partial(draw, key, name)) for key, name in PICTURES.items()]
    text = (home / TEXT, lambda: write_text(home / TEXT, markdown(answer, pictures)))
    write_each([(home / PAGE, whole), *charts, text])


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
        tables=tables_of(answer),
        notes=(*notes_of(answer), *logged.problems),
        steps=run_log.points if run_log and run_log.points else _window_steps(table, answer),
        made=logged.made.get(answer.run_id, ()),
        step_coverage=seen,
        track=track,
        end_unix_s=ended.end_unix_s if ended is not None and ended.is_complete else None,
        spans=measured,
    )


def render(page: Page, drawn: Mapping[str, Figure] | None = None, *, directory: str = "DIR") -> str:
    """The page as text; ``directory`` is what its commands name."""
    modelled = page.answer.modelled
    plan = None if modelled is None else modelled.plan
    rows = () if plan is None else plan.candidates[:NUM_LAYOUTS]
    script = Markup(_text("what_if.js"))
    return _template().render(
        what_if=None if modelled is None else _what_if(modelled, directory),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        card=card_of(
            page.answer, end_unix_s=page.end_unix_s, directory=directory, version=__version__
        ),
        score=finish_line(page.track) if page.track is not None else "",
        tables={table.key: table.within(_MOST_CHARACTERS) for table in page.tables},
        advised=next((n for n, row in enumerate(rows, 1) if plan and row is plan.best), None),
        misses=[f"{row.label}: {why}" for row in rows if plan and (why := plan.obstacle(row))],
        figures=figures(page) if drawn is None else drawn,
        inline=_inline,
        notes=page.notes,
        lines=page.answer.transcript,
        schemes=Markup(schemes(":root")),
        chart_style=Markup(CHART),
        style=Markup(_text("report.css")),
    )


def _what_if(answer: Modelled, directory: str) -> dict[str, Any] | None:
    """The table of choices, and what the script shows of it; None without a choice."""
    if len(answer.what_if) < 2:
        return None
    running, rows = answer.what_if[0].config, what_if_rows(answer.what_if)
    table = what_if_table(rows)
    asked = [predict_words(row.config, running) for row in rows]
    said = [None if words is None else joined(words) for words in asked]
    data = {
        "command": f"forerun predict {quoted(directory)}",
        "running": rows.index(answer.what_if[0]),
        "rows": [[*row, words] for row, words in zip(table.rows, said, strict=True)],
    }
    return {"table": table, "num_menus": NUM_MENUS, "data": data}


def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    return environment.from_string(_text(PAGE))


def _text(name: str) -> str:
    home = resources.files(__package__ or "forerun.launch.report").joinpath("templates")
    return home.joinpath(name).read_text(encoding="utf-8")


def _inline(drawing: Drawing, key: str) -> Markup:
    return Markup(drawing.inline(key))


def _window_steps(table: SampleTable, answer: Answer) -> list[StepPoint]:
    """Bare clean steps of the windows, of the first rank that has them."""
    steps = table.steps
    own = steps[(steps["run_id"] == answer.run_id) & steps["is_clean"] & ~steps["is_hooked"]]
    own = own[own["rank"] == own["rank"].min()].tail(NUM_KEPT_POINTS)
    points = []
    for step, time_s in zip(own["step"], own["time_s"], strict=True):
        said = answer.predicted_step(int(step) + 1)
        points.append(
            StepPoint(
                iteration=int(step) + 1,
                time_s=float(time_s),
                predicted_s=said.time_s,
                low_s=said.low_s,
                high_s=said.high_s,
            )
        )
    return points
