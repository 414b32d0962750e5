"""A run over time: its steps, when it will end, and how often intervals held."""

from __future__ import annotations

from collections.abc import Sequence

from ...calib.answers import moment
from ...calib.forecast import Coverage, PastForecast
from ...calib.units import format_frac, format_time
from ..directory.run_log import StepPoint
from .axes import (
    Scale,
    draw_axes,
    moment_ticks,
    most_ticks,
    on,
    padded,
    round_ticks,
    seconds_unit,
)
from .canvas import Canvas, Drawing

NUM_DRAWN = 400
"""Points of a line that are drawn at most, evenly spread over the run."""
_TOP, _BOTTOM, _RIGHT = 52, 44, 14
_HELD_RANGE = (0.0, 1.0)
_SECONDS_TELL_S = 1800.0


def steps_chart(points: Sequence[StepPoint], width: int) -> Drawing | None:
    """Each step as it was and as it was said to become; None without any."""
    if not points:
        return None
    text, points = _steps_text(points), _thinned(points)
    said = [p for p in points if p.low_s is not None and p.high_s is not None]
    factor, unit = seconds_unit(max(p.time_s for p in points))
    canvas = Canvas(width, 300)
    legend = [("measured", "orange-dots")]
    if said:
        legend = [*legend, ("predicted", "blue-line"), ("90 % interval", "blue-band")]
    top = _TOP + canvas.legend((56, 16), legend)
    x = Scale(
        low=points[0].iteration,
        high=max(points[-1].iteration, points[0].iteration + 1),
        begin=56,
        end=width - _RIGHT,
    )
    # One stall would press all else to a line: what is above is drawn at the top.
    usual = sorted(p.time_s for p in points)[: max(1, int(0.98 * len(points)))]
    low, high = padded([*usual, *(s for p in said for s in (p.low_s or 0.0, p.high_s or 0.0))])
    y = Scale(low=max(0.0, low), high=high, begin=canvas.height - _BOTTOM, end=top)
    ticks = round_ticks(x.low, x.high, most_ticks(x.end - x.begin, "10,000"))
    draw_axes(
        canvas,
        x,
        y,
        (ticks, round_ticks(y.low, y.high, 6, factor=factor)),
        ("step", f"time of a step, {unit}"),
    )
    at = [p.iteration for p in said]
    canvas.area(
        on(x, y, at, [p.high_s or 0.0 for p in said]),
        on(x, y, at, [p.low_s or 0.0 for p in said]),
        "blue-band",
    )
    canvas.path(on(x, y, at, [p.predicted_s or 0.0 for p in said]), "blue-line")
    seen = [min(p.time_s, y.high) for p in points]
    canvas.dots(on(x, y, [p.iteration for p in points], seen), "orange-dots")
    return canvas.finished("Each step, measured and predicted", text)


def _steps_text(points: Sequence[StepPoint]) -> str:
    middle = sorted(p.time_s for p in points)[len(points) // 2]
    text = f"{len(points)} steps, median {format_time(middle)}"
    said = [p for p in points if p.low_s is not None and p.high_s is not None]
    if said:
        held = sum((p.low_s or 0.0) <= p.time_s <= (p.high_s or 0.0) for p in said) / len(said)
        text += f"; the 90 % interval held {format_frac(held)} of the predicted ones"
    return text


def finish_chart(
    made: Sequence[PastForecast], end_unix_s: float | None, width: int
) -> Drawing | None:
    """Each forecast of the end with its interval, and the end once it is known."""
    every = [one for one in made if one.steps_left > 0]
    if not every:
        return None
    made = _thinned(every)
    canvas = Canvas(width, 280)
    legend = [("forecast", "blue-line"), ("90 % interval", "blue-band")]
    if end_unix_s:
        legend.append(("actual end", "limit"))
    top = _TOP + canvas.legend((70, 16), legend)
    at = [one.iteration for one in made]
    last = made[-1].iteration + made[-1].steps_left if end_unix_s else at[-1]
    x = Scale(low=at[0], high=max(last, at[0] + 1), begin=70, end=width - _RIGHT)
    ends = [s for one in made for s in (one.finish_low_unix_s, one.finish_p95_unix_s)]
    low, high = padded([*ends, *([end_unix_s] if end_unix_s else [])], 0.1)
    y = Scale(low=low, high=high, begin=canvas.height - _BOTTOM, end=top)
    ticks = round_ticks(x.low, x.high, most_ticks(x.end - x.begin, "10,000"))
    draw_axes(
        canvas, x, y, (ticks, moment_ticks(low, high, 6)), ("after step", "end of the run, UTC")
    )
    if len(made) == 1:  # a band needs two
        canvas.line((x(at[0]), y(ends[0])), (x(at[0]), y(ends[1])), "blue-line")
    canvas.area(
        on(x, y, at, [one.finish_p95_unix_s for one in made]),
        on(x, y, at, [one.finish_low_unix_s for one in made]),
        "blue-band",
    )
    middle = on(x, y, at, [one.finish_p50_unix_s for one in made])
    canvas.path(middle, "blue-line")
    canvas.dots(middle if len(middle) <= 40 else middle[-1:], "blue-dots")
    if end_unix_s:
        canvas.line((x.begin, y(end_unix_s)), (x.end, y(end_unix_s)), "limit")
    text = _finish_text(every, end_unix_s, high - low)
    return canvas.finished("End of the run by each forecast", text)


def _finish_text(made: Sequence[PastForecast], end_unix_s: float | None, range_s: float) -> str:
    """``range_s`` is what the chart shows: where it is short, seconds tell."""
    newest, has_seconds = made[-1], range_s < _SECONDS_TELL_S
    which = f"newest of {len(made):,} forecasts" if len(made) > 1 else "one forecast"
    end = moment(newest.finish_p50_unix_s, newest.unix_s, has_seconds=has_seconds)
    text = f"The {which}, after step {newest.iteration:,}, says {end}"
    if end_unix_s:
        text += f"; the run ended {moment(end_unix_s, newest.unix_s, has_seconds=has_seconds)}"
    return text


def held_chart(steps: Sequence[Coverage], finish: Sequence[Coverage], width: int) -> Drawing | None:
    """How often intervals held against how often they were to; None where nothing was held."""
    lines = [
        (f"{name} ({seen[0].num})", hue, line, seen)
        for name, hue, line, found in (
            ("single steps", "blue", "blue-line", steps),
            ("finish", "orange", "orange-line dashed", finish),
        )
        if (seen := [one for one in found if one.num])
    ]
    if not lines:
        return None
    size = min(width, 420)
    canvas = Canvas(size, 300)
    names = [("as stated", "grey-line"), *((name, line) for name, _, line, _ in lines)]
    top = _TOP + canvas.legend((56, 16), names)
    x = Scale(low=0.0, high=1.0, begin=56, end=size - _RIGHT)
    y = Scale(low=0.0, high=1.0, begin=canvas.height - _BOTTOM, end=top)
    ticks = round_ticks(0.0, 1.0, 6, factor=100)
    draw_axes(canvas, x, y, (ticks, ticks), ("interval, %", "held, %"))
    canvas.path(on(x, y, _HELD_RANGE, _HELD_RANGE), "grey-line")
    for _, hue, line, seen in lines:
        points = on(x, y, [s.nominal_frac for s in seen], [s.observed_frac for s in seen])
        canvas.path(points, line)
        canvas.dots(points, f"{hue}-dots")
    texts = [
        f"{name}: the {format_frac(s.nominal_frac)} interval held {format_frac(s.observed_frac)}"
        for name, _, _, seen in lines
        for s in seen[-1:]
    ]
    return canvas.finished("How often intervals held", "; ".join(texts))


def _thinned(values: Sequence) -> Sequence:
    """The last one always stays."""
    every = -(-len(values) // NUM_DRAWN) or 1
    return [*values[:-1:every], *values[-1:]]
