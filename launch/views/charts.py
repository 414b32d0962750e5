"""Charts of an answer: the run over time, layouts, and the step's terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from ...calib.advice.explanation import Difference, Explained, Explanation, TermTime
from ...calib.advice.planning import Candidate, Plan
from ...calib.answers.answer import Answer
from ...calib.forecast.forecast_record import Forecast
from ...calib.memory.peak import Verdict
from ...calib.records.iso_times import format_moment
from ...calib.timeline.terms import TERM_TEXTS
from ...calib.units import GIB, MIB, format_bytes, format_frac, format_time
from ..store.run_log import LoggedStep
from ._canvas import (
    Canvas,
    Drawing,
    Plot,
    Point,
    Scale,
    elided,
    padded,
    seconds_unit,
    text_width,
)
from .answer_tables import NUM_LAYOUTS

NUM_DRAWN = 400
"""Maximum number of points of a line, evenly spaced over the run."""
WIDTH, NARROW = 820, 358
"""Widths in pixels; the narrow one is for a phone screen of 390."""
_SHOW_SECONDS_BELOW_S = 1800.0
_ROW, _BAR, _TOP = 22, 14, 27
_MOST_LABEL = 16
_SMALL_FRAC = 0.005
"""Fraction of the longest bar's end below which bars share a row."""
_RUNNING, _OTHER, _REFUSED = "orange-dots large", "blue-dots large", "grey-ring"
_NEAR = 3.0
"""Ratio of capacity to largest need above which the capacity line is omitted."""
_Box: TypeAlias = "tuple[float, float, float, float]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart in both widths, and the section of the page that it stands in."""

    section: str
    wide: Drawing
    narrow: Drawing


def figures(
    answer: Answer, steps: Sequence[LoggedStep], made: Sequence[Forecast], end_unix_s: float | None
) -> dict[str, Figure]:
    """Return the charts of an answer that have data, by their keys on the page."""
    makers: dict[str, tuple[str, Callable[[int], Drawing | None]]] = {
        "finish": ("ends", lambda width: finish_chart(made, end_unix_s, width)),
        "steps": ("ends", lambda width: steps_chart(steps, width)),
    }
    if (known := answer.modelled) is not None:
        rows = known.plan.candidates[:NUM_LAYOUTS]
        makers["layouts"] = "layouts", partial(layouts_chart, known.plan, rows)
        for key, explained in zip(("running", "advised"), known.explained, strict=False):
            makers[key] = "goes", partial(waterfall, explained)
    drawn = ((key, section, make(WIDTH), make(NARROW)) for key, (section, make) in makers.items())
    return {
        key: Figure(section=section, wide=wide, narrow=narrow)
        for key, section, wide, narrow in drawn
        if wide and narrow
    }


def steps_chart(points: Sequence[LoggedStep], width: int) -> Drawing | None:
    """Chart measured and predicted step times; None for fewer than two steps."""
    if len(points) < 2:
        return None
    text, points = _steps_text(points), _thinned(points)
    known = ((p.iteration, p.predicted) for p in points)
    predicted = [(n, one.low_s, one.time_s, one.high_s) for n, one in known if one is not None]
    factor, unit = seconds_unit(max(p.time_s for p in points))
    legend = [("measured", "orange-dots")]
    if predicted:
        legend += [("predicted", "blue-line"), ("90 % interval", "blue-band")]
    # A single stall would flatten all else, so outliers are clipped to the top.
    usual = sorted(p.time_s for p in points)[: max(1, int(0.98 * len(points)))]
    low, high = padded([*usual, *(end for row in predicted for end in (row[1], row[3]))])
    plot = Plot(
        (width, 300),
        legend,
        ((points[0].iteration, points[-1].iteration), "10,000"),
        (max(0.0, low), high),
        ("step", f"time of a step, {unit}"),
        factor=factor,
    )
    if predicted:
        at, lows, middles, highs = zip(*predicted, strict=True)
        plot.band(at, lows, highs, "blue-band")
        plot.path(plot.on(at, middles), "blue-line")
    seen = [min(p.time_s, plot.y.high) for p in points]
    plot.dots(plot.on([p.iteration for p in points], seen), "orange-dots")
    return plot.finished("Each step, measured and predicted", text)


def _steps_text(points: Sequence[LoggedStep]) -> str:
    middle = sorted(p.time_s for p in points)[len(points) // 2]
    text = f"{len(points)} steps, median {format_time(middle)}"
    predicted = [(p.time_s, p.predicted) for p in points if p.predicted is not None]
    if predicted:
        num_inside = sum(one.low_s <= time_s <= one.high_s for time_s, one in predicted)
        covered_frac = num_inside / len(predicted)
        text += f"; the 90 % intervals contained {format_frac(covered_frac)} of the predicted ones"
    return text


def finish_chart(made: Sequence[Forecast], end_unix_s: float | None, width: int) -> Drawing | None:
    """Chart forecasts of the end with their intervals, and the actual end if known; None for a
    single point."""
    every = [one for one in made if one.steps_left > 0]
    if not every or len(every) + bool(end_unix_s) < 2:
        return None
    made = _thinned(every)
    at = [one.steps_done for one in made]
    lows, highs = ([getattr(one, f"finish_{end}_unix_s") for one in made] for end in ("low", "p95"))
    low, high = padded([*lows, *highs, *([end_unix_s] if end_unix_s else [])], 0.1)
    last = at[-1] + made[-1].steps_left if end_unix_s else at[-1]
    legend = [("forecast", "blue-line"), ("90 % interval", "blue-band")]
    plot = Plot(
        (width, 280),
        legend + [("actual end", "limit")] * bool(end_unix_s),
        ((at[0], last), "10,000"),
        (low, high),
        ("after step", "end of the run, UTC"),
        left=70,
        has_moments=True,
    )
    plot.band(at, lows, highs, "blue-band")
    if len(at) == 1:  # a band needs two
        plot.path(plot.on((at[0], at[0]), (lows[0], highs[0])), "blue-line")
    middle = plot.on(at, [one.finish_p50_unix_s for one in made])
    plot.path(middle, "blue-line")
    plot.dots(middle if len(middle) <= 40 else middle[-1:], "blue-dots")
    newest, has_seconds = every[-1], high - low < _SHOW_SECONDS_BELOW_S
    end = format_moment(newest.finish_p50_unix_s, newest.now_unix_s, has_seconds=has_seconds)
    which = f"newest of {len(every):,} forecasts" if len(every) > 1 else "one forecast"
    text = f"The {which}, after step {newest.steps_done:,}, says {end}"
    if end_unix_s:
        plot.limit(y=end_unix_s)
        ended = format_moment(end_unix_s, newest.now_unix_s, has_seconds=has_seconds)
        text += f"; the run ended {ended}"
    return plot.finished("End of the run by each forecast", text)


def _thinned(values: Sequence) -> Sequence:
    """Return an evenly spaced sample of the values, including the last."""
    every = -(-len(values) // NUM_DRAWN) or 1
    return [*values[:-1:every], *values[-1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Row of a bar chart: name, bar from ``begin`` to ``end``, and the text after it."""

    name: str
    end: float
    text: str
    hue: str = "blue"
    begin: float = 0.0
    spread: tuple[float, float] | None = None
    """90 % interval of the end."""


def waterfall(explanation: Explanation, width: int = WIDTH) -> Drawing:
    """Chart the terms of a step from 0 to its time, or of a difference between two steps."""
    one, against = explanation.one, explanation.difference
    if against is None:
        title = f"Where the step of {one.label} goes"
        rest = _falling(one.terms, 0.0, one.estimate.time_s, is_signed=False)
        bars = [*rest, _step("step", one)]
    else:
        title = f"From {against.other.label} (B) to {against.one.label} (A)"
        bars = [*_of_two(against)]
    seen = {bar.hue for bar in bars}
    legend = {"blue": "a step", "green": "less", "orange": "more"}
    names = [(name, hue) for hue, name in legend.items() if hue in seen]
    drawing = bars_chart(
        title,
        bars,
        [*names, ("90 % interval", "error")],
        width,
        text=explanation.sentence,
    )
    return drawing or Canvas(width, _TOP).finished(title, explanation.sentence)


def _of_two(difference: Difference) -> Iterator[Bar]:
    yield _step(_side("B", difference.other), difference.other)
    start_s = difference.other.estimate.time_s
    longest_s = max(start_s, difference.one.estimate.time_s)
    yield from _falling(difference.terms, start_s, longest_s, is_signed=True)
    yield _step(_side("A", difference.one), difference.one)


def _side(letter: str, one: Explained) -> str:
    """Return the letter in the title, with the layout if its label is short enough."""
    return f"{letter}: {one.label}" if len(one.label) <= _MOST_LABEL else letter


def _step(name: str, one: Explained) -> Bar:
    step = one.estimate
    text = format_time(step.time_s)
    return Bar(name=name, end=step.time_s, text=text, spread=(step.low_s, step.high_s))


def _falling(
    terms: Sequence[TermTime], start_s: float, longest_s: float, *, is_signed: bool
) -> Iterator[Bar]:
    at_s, small_s = start_s, 0.0
    for term in terms:
        if abs(term.time_s) < _SMALL_FRAC * longest_s:
            small_s += term.time_s
            continue
        yield Bar(
            name=TERM_TEXTS[term.term],
            hue=("green" if term.time_s < 0 else "orange") if is_signed else "blue",
            begin=at_s,
            end=at_s + term.time_s,
            text=_signed(term.time_s, is_signed),
            spread=(at_s + term.low_s, at_s + term.high_s),
        )
        at_s += term.time_s
    if small_s:
        text = _signed(small_s, is_signed)
        yield Bar(name="all else", hue="grey", begin=at_s, end=at_s + small_s, text=text)


def _signed(time_s: float, is_signed: bool) -> str:
    return "+" * (is_signed and time_s > 0) + format_time(time_s)


def bars_chart(
    title: str,
    bars: Sequence[Bar],
    names: Sequence[tuple[str, str]],
    width: int,
    *,
    text: str,
) -> Drawing | None:
    """Draw a row for each bar, joined to the end of the one above.  None if no bar has a length."""
    ends = [end for bar in bars for end in (bar.begin, bar.end, *(bar.spread or ()))]
    if max(ends, default=0.0) <= 0:
        return None
    left = min(0.4 * width, max(text_width(bar.name) for bar in bars) + 12)
    right = max(text_width(bar.text) for bar in bars) + 14
    top = _TOP if names else 5
    canvas = Canvas(width, top + 3 + _ROW * len(bars) + 8)
    if names:
        top += canvas.legend((left, 16), names)
    x = Scale(low=min(0.0, *ends), high=max(ends), begin=left, end=width - right)
    for place, bar in enumerate(bars):
        y = top + place * _ROW
        _draw_bar(canvas, bar, x, y)
        if place + 1 < len(bars):
            at = x(bar.end)
            canvas.line((at, y + 4 + _BAR), (at, y + _ROW + 4), "grid")
    return canvas.finished(title, text)


def _draw_bar(canvas: Canvas, bar: Bar, x: Scale, top: float) -> None:
    """Draw one row: name, bar, interval if there is one, and text."""
    low, high = sorted((x(bar.begin), x(bar.end)))
    high = max(high, low + 1.0)
    name = elided(bar.name, x.begin - 10)
    shown = bar.name if name != bar.name else ""
    canvas.text((x.begin - 8, top + 15), name, anchor="end", shown=shown)
    canvas.rect((low, top + 4), (high - low, _BAR), bar.hue)
    if bar.spread is not None:
        ends = [(x(end), top + 4 + _BAR / 2) for end in bar.spread]
        canvas.line(ends[0], ends[1], "error")
        high = max(high, ends[1][0])
    canvas.text((high + 6, top + 15), bar.text, "faint")


def layouts_chart(plan: Plan, rows: Sequence[Candidate], width: int) -> Drawing | None:
    """Chart the running layout and ``rows`` of its plan by row number; None without rows.

    Vertical lines are 90 % intervals; the dashed one is the memory capacity.
    """
    if not rows:
        return None
    capacity, shown = plan.memory_capacity_nbytes, (plan.running, *rows)
    factor, unit = seconds_unit(max(one.step_time_s for one in shown))
    most_nbytes = max(one.memory.total_nbytes for one in shown)
    size, named = (GIB, "GiB") if most_nbytes >= GIB else (MIB, "MiB")
    needs = [one.memory.total_nbytes / size for one in shown]
    # If memory is ample, its limit on the axis would squeeze all layouts into a corner.
    is_near = capacity is not None and capacity < _NEAR * most_nbytes
    limit = capacity / size if capacity is not None and is_near else None
    least, most = (0.0, 1.08 * max(*needs, limit)) if limit else padded(needs, 0.2)
    low, high = padded([s for one in shown for s in (one.low_s, one.high_s)])
    kinds = [_RUNNING, *(_REFUSED if plan.obstacle(one) else _OTHER for one in rows)]
    meanings = {
        _RUNNING: "running", _OTHER: "other layouts", _REFUSED: "not offered"
    }  # fmt: skip
    legend = [(name, kind) for kind, name in meanings.items() if kind in kinds]
    there = f" of {format_bytes(capacity)}" if capacity is not None and limit is None else ""
    plot = Plot(
        (width, 340),
        legend + [("memory of a device", "limit")] * (limit is not None),
        ((max(0.0, least), most), "1,000"),
        (max(0.0, low), high),
        (f"memory that it needs, {named}{there}", f"time of a step, {unit}"),
        factor=factor,
    )
    if limit is not None:
        plot.limit(x=limit)
    places = plot.on(needs, [one.step_time_s for one in shown])
    _draw_layouts(plot, plan, shown, kinds, places)
    return plot.finished("Layouts: memory against the time of a step", _layouts_text(plan, rows))


def _draw_layouts(
    plot: Plot,
    plan: Plan,
    shown: Sequence[Candidate],
    kinds: Sequence[str],
    places: Sequence[Point],
) -> None:
    names = ["running", *map(str, range(1, len(shown)))]
    spreads = [(plot.y(one.high_s), plot.y(one.low_s)) for one in shown]
    labels = label_places(places, names, plot.width, spreads)
    for at, (high_y, low_y) in zip(places, spreads, strict=True):
        plot.line((at[0], low_y), (at[0], high_y), "error")
    for one, at, name, label, kind in zip(shown, places, names, labels, kinds, strict=True):
        if kind == _REFUSED:
            plot.ring(at, 4, kind)
        else:
            plot.dots([at], kind)
        if one is plan.best:
            plot.ring(at, 9, "ring")
        ends = f"{format_time(one.low_s)} to {format_time(one.high_s)}"
        tooltip = f"{one.label}: {format_time(one.step_time_s)} ({ends}), "
        tooltip += format_bytes(one.memory.total_nbytes)
        plot.text(label, name, "strong" * (one is plan.best), shown=tooltip)


def label_places(
    points: Sequence[Point],
    names: Sequence[str],
    width: int,
    spreads: Sequence[tuple[float, float]] = (),
) -> list[Point]:
    """Return a label position for each point: the first free one of a few candidates.

    ``spreads`` are the ends of vertical lines through the points; labels overlap one only if there
    is no other position.
    """
    pairs = zip(points, spreads, strict=False)
    lines: list[_Box] = [(x - 2, top, x + 2, bottom) for (x, _), (top, bottom) in pairs]
    taken: list[_Box] = [(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    label_points = []
    for (x, y), name in zip(points, names, strict=True):
        wide = text_width(name)
        tried = [(x + 11, y + 4), (x - 11 - wide, y + 4)]
        tried += [(x - wide / 2, y + rise) for rise in (-12, 20, -26, 34, -40, 48)]
        boxes = [(at[0], at[1] - 11, at[0] + wide, at[1] + 2) for at in tried]
        free = [
            place
            for place, box in enumerate(boxes)
            if box[0] >= 0 and box[2] <= width and not any(_meets(box, one) for one in taken)
        ]
        clear = [place for place in free if not any(_meets(boxes[place], one) for one in lines)]
        best = next(iter([*clear, *free]), 0)
        taken.append(boxes[best])
        label_points.append(tried[best])
    return label_points


def _meets(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _layouts_text(plan: Plan, rows: Sequence[Candidate]) -> str:
    running, best = plan.running, plan.best
    text = f"The running layout {running.label} takes {format_time(running.step_time_s)} per step"
    if best is None or best not in rows:
        misfits = sum(one.verdict is Verdict.DOES_NOT_FIT for one in rows)
        text += f"; none of these {len(rows)} others is offered"
        return f"{text}, {misfits} do not fit" if misfits else text
    return (
        f"{text}; number {rows.index(best) + 1}, {best.label}, is the best that is offered: "
        f"{format_time(best.step_time_s)}, {best.change_text}, in "
        f"{format_bytes(best.memory.total_nbytes)}"
    )
