"""The figures of a page: each a chart in two widths, under the section that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ...calib.answers import Answer, Modelled
from ...calib.forecast import Coverage, Evaluation, PastForecast
from ...calib.timeline import MeasuredSpan
from ..directory.run_log import StepPoint
from ..drawing.bar_charts import waiting_chart, work_chart
from ..drawing.canvas import Drawing
from ..drawing.layout_chart import layouts_chart
from ..drawing.run_charts import finish_chart, held_chart, steps_chart
from ..drawing.timeline_chart import timeline_chart
from ..drawing.waterfall import waterfall
from .layout_tables import NUM_LAYOUTS
from .table import ReportTable

Make = Callable[[int], Drawing | None]
WIDE, NARROW = 820, 358
"""Pixels; the narrow one is for a telephone that is 390 wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything that a page shows."""

    answer: Answer
    tables: Sequence[ReportTable]
    notes: Sequence[str] = ()
    steps: Sequence[StepPoint] = ()
    made: Sequence[PastForecast] = ()
    step_coverage: Sequence[Coverage] = ()
    """Of single steps so far."""
    track: Evaluation | None = None
    """Once the run has ended."""
    end_unix_s: float | None = None
    spans: Sequence[MeasuredSpan] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart of a page, by its key there."""

    key: str
    wide: Drawing
    narrow: Drawing


def figures(page: Page) -> dict[str, Figure]:
    """Those that have something to show, by their keys."""
    finish = page.track.finish if page.track is not None else ()
    makers: dict[str, Make] = {
        "finish": lambda width: finish_chart(page.made, page.end_unix_s, width),
        "steps": lambda width: steps_chart(page.steps, width),
        "held": lambda width: held_chart(page.step_coverage, finish, width),
    }
    if page.answer.modelled is not None:
        makers |= _of_model(page.answer.modelled, page.spans)
    drawn = ((key, make(WIDE), make(NARROW)) for key, make in makers.items())
    return {
        key: Figure(key=key, wide=wide, narrow=narrow)
        for key, wide, narrow in drawn
        if wide is not None and narrow is not None
    }


def _of_model(answer: Modelled, spans: Sequence[MeasuredSpan]) -> dict[str, Make]:
    rows = answer.plan.candidates[:NUM_LAYOUTS]
    found: dict[str, Make] = {
        "layouts": lambda width: layouts_chart(answer.plan, rows, width),
        "timeline": lambda width: timeline_chart(answer.own.spans, spans, width),
        "work": lambda width: work_chart(answer.own.contributions, answer.own.time_s, width),
        "waiting": lambda width: waiting_chart(answer.skew_s, width),
    }
    for key, explained in zip(("running", "advised"), answer.explained, strict=False):
        found[key] = partial(waterfall, explained)
    return found
