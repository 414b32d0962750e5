"""An explanation as a waterfall: the terms of a step, or from one layout's step to another's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...calib.advice import Difference, Explained, Explanation, TermTime
from ...calib.timeline import TERM_TEXTS
from ...calib.units import format_time
from .axes import Scale
from .bar_charts import Bar, draw_bar, margins
from .canvas import Canvas, Drawing

WIDTH = 820
_ROW, _TOP = 24, 34
_MOST_LABEL = 16
_SMALL_FRAC = 0.005
"""Of the longest bar's end: shorter ones share a row."""
_LEGEND = {"blue": "a step", "green": "less", "orange": "more"}


def waterfall(found: Explanation, width: int = WIDTH) -> Drawing:
    """The terms of a step from 0 to its time, or of a difference from one step to the other."""
    if found.difference is None:
        title = f"Where the step of {found.one.label} goes"
        return _drawn(title, found.sentence, list(_of_one(found.one)), width)
    against = found.difference
    title = f"From {against.other.label} (B) to {against.one.label} (A)"
    return _drawn(title, found.sentence, list(_of_two(against)), width)


def _of_one(one: Explained) -> Iterator[Bar]:
    yield from _falling(one.terms, 0.0, one.estimate.time_s, is_signed=False)
    yield _step("step", one)


def _of_two(found: Difference) -> Iterator[Bar]:
    yield _step(_side("B", found.other), found.other)
    start_s = found.other.estimate.time_s
    longest_s = max(start_s, found.one.estimate.time_s)
    yield from _falling(found.terms, start_s, longest_s, is_signed=True)
    yield _step(_side("A", found.one), found.one)


def _side(letter: str, one: Explained) -> str:
    """The letter of the title, with the layout where its name takes no room from the bars."""
    return f"{letter}: {one.label}" if len(one.label) <= _MOST_LABEL else letter


def _step(name: str, one: Explained) -> Bar:
    step = one.estimate
    return Bar(
        name=name,
        end=step.time_s,
        text=format_time(step.time_s),
        spread=(step.low_s, step.high_s),
    )


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
            hue=_hue(term.time_s, is_signed),
            begin=at_s,
            end=at_s + term.time_s,
            text=_text(term.time_s, is_signed),
            spread=(at_s + term.low_s, at_s + term.high_s),
        )
        at_s += term.time_s
    if small_s:
        text = _text(small_s, is_signed)
        yield Bar(name="all else", hue="grey", begin=at_s, end=at_s + small_s, text=text)


def _hue(time_s: float, is_signed: bool) -> str:
    if not is_signed:
        return "blue"
    return "green" if time_s < 0 else "orange"


def _text(time_s: float, is_signed: bool) -> str:
    sign = "+" if is_signed and time_s > 0 else ""
    return f"{sign}{format_time(time_s)}"


def _drawn(title: str, text: str, bars: Sequence[Bar], width: int) -> Drawing:
    ends = [end for bar in bars for end in (bar.begin, bar.end, *(bar.spread or ()))]
    left, right = margins(bars)
    seen = {bar.hue for bar in bars}
    names = [(name, hue) for hue, name in _LEGEND.items() if hue in seen]
    canvas = Canvas(width, _TOP + _ROW * len(bars) + 6)
    x = Scale(low=min(0.0, *ends), high=max(ends), begin=left, end=width - right)
    top = _TOP + canvas.legend((left, 16), [*names, ("90 % interval", "error")])
    for place, bar in enumerate(bars):
        y = top + place * _ROW + 1
        draw_bar(canvas, bar, x, y)
        if place + 1 < len(bars):
            at = x(bar.end)
            canvas.line((at, y + 18), (at, y + _ROW + 4), "grid")
    return canvas.finished(title, text)
