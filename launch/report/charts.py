"""The charts of a report as plotly figures in plain values; an empty one is None."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ...calib.answers.analysis import Answer
from ...calib.forecast.evaluation import Coverage, Evaluation, PastForecast
from ...calib.timeline.measured import MeasuredSpan
from ...calib.timeline.programs import TaskKind
from ..directory.run_log import StepPoint
from .layout_tables import NUM_LAYOUTS
from .table import ReportTable

Figure = dict[str, Any]
BLUE, ORANGE, GREEN, GREY = "#2a6fb0", "#d9822b", "#3d9a5f", "#8a8f98"
BAND = "rgba(42,111,176,0.16)"
_COLOURS = {
    "forward": BLUE,
    "backward": ORANGE,
    "input": ORANGE,
    "weight": "#e9b872",
    "optimizer": "#b5443c",
    "exchange": GREY,
    "transfer": GREY,
}
"""By the first word of what a bar stands for; all other is traffic between data-parallel ranks."""
NUM_SPANS = 1200
"""Bars of a timeline that are drawn at most, the longest."""
NUM_FORECASTS = 400
"""Forecasts that are drawn at most, evenly spread over the run."""
NUM_OPERATORS = 24
"""Operators that are drawn at most, the longest."""
_DIGITS = 6
"""Of a number in the page, which is read by eye: the page stays small."""


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
    operators: Sequence[tuple[str, float, float]] = ()
    """Name, predicted and measured seconds of one call."""
    spans: Sequence[MeasuredSpan] = ()


def charts(page: Page) -> list[tuple[str, Figure]]:
    """Titled figures, in the order of the page; those without anything to show are left out."""
    found = [
        ("Step time, predicted and measured", _steps(page)),
        ("When the run ends, as forecast over time", _finish(page)),
        ("Calibration: how often intervals held", _calibration(page)),
        ("Operators, predicted against measured", _operators(page)),
        ("Layouts, with 90 % intervals", _layouts(page)),
        ("Waiting for later ranks, by rank", _waiting(page)),
        ("One step, as predicted", _predicted_step(page)),
        ("One step, as measured", _measured_step(page)),
    ]
    return [(title, figure) for title, figure in found if figure is not None]


def _steps(page: Page) -> Figure | None:
    if not page.steps:
        return None
    said = [p for p in page.steps if p.predicted_s is not None]
    unit, name = _unit(max(p.time_s for p in page.steps))
    traces = []
    if said:
        at = [p.iteration for p in said]
        traces += _band(at, [p.low_s for p in said], [p.high_s for p in said], unit)
        traces.append(_line(at, [p.predicted_s for p in said], "predicted", BLUE, unit))
    dots = _line(
        [p.iteration for p in page.steps], [p.time_s for p in page.steps], "measured", ORANGE, unit
    )
    traces.append(dots | {"mode": "markers", "marker": {"size": 5, "color": ORANGE}})
    return _figure(traces, "step", f"time of a step, {name}")


def _finish(page: Page) -> Figure | None:
    made = _thinned([m for m in page.made if m.steps_left > 0], NUM_FORECASTS)
    if not made:
        return None
    at = [m.iteration for m in made]
    lows = [_moment(m.finish_low_unix_s) for m in made]
    highs = [_moment(m.finish_p95_unix_s) for m in made]
    middle = [_moment(m.finish_p50_unix_s) for m in made]
    traces = [
        *_band(at, lows, highs),
        _line(at, middle, "forecast (P50)", BLUE) | {"mode": "lines+markers"},
    ]
    if page.end_unix_s is not None:
        end = _moment(page.end_unix_s)
        actual = _line([at[0], max(at[-1], at[0] + 1)], [end, end], "actual end", ORANGE)
        traces.append(actual | {"line": {"color": ORANGE, "dash": "dash"}})
    return _figure(traces, "step at which it was made", "end of the run, UTC")


def _calibration(page: Page) -> Figure | None:
    rows = [("single steps", page.step_coverage, BLUE)]
    if page.track is not None:
        rows.append(("finish", page.track.finish, ORANGE))
    stated = _line([0, 100], [0, 100], "as stated", GREY)
    traces = [stated | {"line": {"color": GREY, "dash": "dot"}}]
    for name, found, colour in rows:
        seen = [row for row in found if row.num]
        if seen:
            nominal = [100 * row.nominal_frac for row in seen]
            observed = [round(100 * row.observed_frac, 2) for row in seen]
            line = _line(nominal, observed, f"{name} ({seen[0].num})", colour)
            traces.append(line | {"mode": "lines+markers"})
    if len(traces) == 1:
        return None
    return _figure(traces, "nominal, %", "observed, %", yaxis={"range": [0, 104]})


def _operators(page: Page) -> Figure | None:
    rows = sorted(page.operators, key=lambda row: -row[2])[:NUM_OPERATORS][::-1]
    if not rows:
        return None
    unit, name = _unit(rows[-1][2])
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [row[0] for row in rows],
            "x": _scaled(times_s, unit),
            "name": label,
            "marker": {"color": colour},
        }
        for label, times_s, colour in (
            ("measured", [row[2] for row in rows], ORANGE),
            ("predicted without it", [row[1] for row in rows], BLUE),
        )
    ]
    return _rows_figure(traces, f"time of one call, {name}", len(rows), {"dtick": 1})


def _layouts(page: Page) -> Figure | None:
    plan = page.answer.plan
    rows = [plan.own, *plan.candidates[:NUM_LAYOUTS]]
    unit, name = _unit(max(row.high_s for row in rows))
    rows = sorted(rows, key=lambda row: -row.step_time_s)
    trace = {
        "type": "scatter",
        "mode": "markers",
        "y": [row.label + (" (running)" if row is plan.own else "") for row in rows],
        "x": _scaled([row.step_time_s for row in rows], unit),
        "marker": {"size": 9, "color": [ORANGE if row is plan.own else BLUE for row in rows]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": _scaled([row.high_s - row.step_time_s for row in rows], unit),
            "arrayminus": _scaled([row.step_time_s - row.low_s for row in rows], unit),
            "color": GREY,
        },
        "showlegend": False,
    }
    return _rows_figure([trace], f"time of a step, {name}", len(rows), {"dtick": 1})


def _waiting(page: Page) -> Figure | None:
    waits = dict(sorted(page.answer.skew_s.items()))
    if not waits:
        return None
    unit, name = _unit(max(waits.values()))
    bars = {
        "type": "bar",
        "x": [str(rank) for rank in waits],
        "y": _scaled(waits.values(), unit),
        "marker": {"color": BLUE},
        "showlegend": False,
    }
    return _figure([bars], "rank", f"waits in a step, {name}", xaxis={"type": "category"})


def _predicted_step(page: Page) -> Figure | None:
    def track(stage: int, kind: TaskKind) -> str:
        return f"stage {stage}" + (" sends" if kind is TaskKind.TRANSFER else "")

    spans = page.answer.own.spans
    return _gantt([(track(s.stage, s.kind), s.kind.value, s.start_s, s.end_s) for s in spans])


def _measured_step(page: Page) -> Figure | None:
    return _gantt([(s.track, s.name.rsplit(" ", 1)[0], s.start_s, s.end_s) for s in page.spans])


def _gantt(bars: Sequence[tuple[str, str, float, float]]) -> Figure | None:
    """Bars of a timeline: one trace for each kind, so that the legend names the colours."""
    if not bars:
        return None
    kept = sorted(bars, key=lambda bar: bar[2] - bar[3])[:NUM_SPANS]
    unit, name = _unit(max(bar[3] for bar in kept))
    tracks = sorted({bar[0] for bar in kept}, reverse=True, key=_by_number)
    traces = []
    for kind in sorted({bar[1] for bar in kept}):
        own = [bar for bar in kept if bar[1] == kind]
        colour = _COLOURS.get(kind.replace("-", " ").split()[0], GREEN)
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": kind,
                "y": [bar[0] for bar in own],
                "base": _scaled([bar[2] for bar in own], unit),
                "x": _scaled([bar[3] - bar[2] for bar in own], unit),
                "marker": {"color": colour, "line": {"width": 0.5, "color": "white"}},
            }
        )
    order = {"categoryorder": "array", "categoryarray": tracks}
    figure = _rows_figure(traces, f"time in the step, {name}", len(tracks), order, row_height=34)
    figure["layout"] |= {"barmode": "overlay"}
    return figure


def _by_number(track: str) -> tuple[int, str]:
    number = next((word for word in track.split() if word.isdigit()), "0")
    return int(number), track


def _band(at: Sequence[Any], lows: Sequence[Any], highs: Sequence[Any], unit: float = 0) -> list:
    low = _line(at, lows, "90 % interval", BLUE, unit) | {"line": {"width": 0}, "showlegend": False}
    high = _line(at, highs, "90 % interval", BLUE, unit) | {"line": {"width": 0}}
    return [low, high | {"fill": "tonexty", "fillcolor": BAND}]


def _line(
    x: Sequence[Any], y: Sequence[Any], name: str, colour: str, unit: float = 0
) -> dict[str, Any]:
    """A line; numbers in ``unit`` are scaled and rounded, moments stay as they are."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(x),
        "y": _scaled(y, unit) if unit else list(y),
        "name": name,
        "line": {"color": colour},
    }


def _rows_figure(
    traces: Sequence[Figure], x: str, num_rows: int, order: Figure, *, row_height: int = 26
) -> Figure:
    """A figure with names from top to bottom, and room for each."""
    yaxis = {"type": "category", **order}
    return _figure(traces, x, "", height=140 + row_height * num_rows, yaxis=yaxis)


def _figure(
    traces: Sequence[Figure],
    x: str,
    y: str,
    *,
    height: int = 360,
    xaxis: Figure | None = None,
    yaxis: Figure | None = None,
) -> Figure:
    """``traces`` over axes with these titles, and what else is to be said of an axis."""
    plain = {"gridcolor": "#e6e8eb", "zeroline": False}
    return {
        "data": list(traces),
        "layout": {
            "height": height,
            "margin": {"l": 70, "r": 20, "t": 20, "b": 50},
            "plot_bgcolor": "white",
            "xaxis": {"title": {"text": x}, **plain, **(xaxis or {})},
            "yaxis": {"title": {"text": y}, **plain, "automargin": True, **(yaxis or {})},
            "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom"},
        },
    }


def _unit(most_s: float) -> tuple[float, str]:
    if most_s >= 1.0:
        return 1.0, "s"
    return (1e3, "ms") if most_s >= 1e-3 else (1e6, "µs")


def _scaled(values: Iterable[float], unit: float) -> list[float]:
    return [float(f"{value * unit:.{_DIGITS}g}") for value in values]


def _thinned(values: Sequence[PastForecast], most: int) -> Sequence[PastForecast]:
    every = -(-len(values) // most) or 1
    return [*values[:-1:every], *values[-1:]]


def _moment(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    except (ValueError, OverflowError, OSError):
        return "9999-12-31 00:00:00.000"
