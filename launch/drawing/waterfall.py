"""An explanation as a waterfall: the terms of a step, or from one layout's step to another's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...calib.advice.explain import Difference, Explained, Explanation, TermTime
from ...calib.timeline.terms import TERM_TEXTS
from ...calib.units import format_time
from .axes import Scale
from .canvas import Canvas, Drawing, text_width

WIDTH = 820
_ROW, _BAR, _TOP = 24, 14, 34
_MOST_LABEL = 16
_SMALL_FRAC = 0.005
"""Of the longest bar's end: shorter ones share a row."""
_HUES = {"step": "blue", "less": "green", "more": "orange", "small": "grey"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    name: str
    kind: str
    begin_s: float
    end_s: float
    text: str
    spread_s: tuple[float, float] | None = None
    """Where the 90 % interval of the end lies."""


def waterfall(found: Explanation, width: int = WIDTH) -> Drawing:
    """The terms of a step from 0 to its time, or of a difference from one step to the other."""
    if found.difference is None:
        title = f"Where the step of {found.one.label} goes"
        return _drawn(title, found.sentence, list(_of_one(found.one)), width)
    against = found.difference
    title = f"From {against.other.label} (B) to {against.one.label} (A)"
    return _drawn(title, found.sentence, list(_of_two(against)), width)


def _of_one(one: Explained) -> Iterator[_Bar]:
    yield from _falling(one.terms, 0.0, one.estimate.time_s, is_signed=False)
    yield _step("step", one)


def _of_two(found: Difference) -> Iterator[_Bar]:
    yield _step(_side("B", found.other), found.other)
    start_s = found.other.estimate.time_s
    longest_s = max(start_s, found.one.estimate.time_s)
    yield from _falling(found.terms, start_s, longest_s, is_signed=True)
    yield _step(_side("A", found.one), found.one)


def _side(letter: str, one: Explained) -> str:
    """The letter of the title, with the layout where its name takes no room from the bars."""
    return f"{letter}: {one.label}" if len(one.label) <= _MOST_LABEL else letter


def _step(name: str, one: Explained) -> _Bar:
    step = one.estimate
    return _Bar(
        name=name,
        kind="step",
        begin_s=0.0,
        end_s=step.time_s,
        text=format_time(step.time_s),
        spread_s=(step.low_s, step.high_s),
    )


def _falling(
    terms: Sequence[TermTime], start_s: float, longest_s: float, *, is_signed: bool
) -> Iterator[_Bar]:
    at_s, small_s = start_s, 0.0
    for term in terms:
        if abs(term.time_s) < _SMALL_FRAC * longest_s:
            small_s += term.time_s
            continue
        yield _Bar(
            name=TERM_TEXTS[term.term],
            kind=_kind(term.time_s, is_signed),
            begin_s=at_s,
            end_s=at_s + term.time_s,
            text=_text(term.time_s, is_signed),
            spread_s=(at_s + term.low_s, at_s + term.high_s),
        )
        at_s += term.time_s
    if small_s:
        text = _text(small_s, is_signed)
        yield _Bar(name="all else", kind="small", begin_s=at_s, end_s=at_s + small_s, text=text)


def _kind(time_s: float, is_signed: bool) -> str:
    if not is_signed:
        return "step"
    return "less" if time_s < 0 else "more"


def _text(time_s: float, is_signed: bool) -> str:
    sign = "+" if is_signed and time_s > 0 else ""
    return f"{sign}{format_time(time_s)}"


def _drawn(title: str, text: str, bars: Sequence[_Bar], width: int) -> Drawing:
    ends = [end for bar in bars for end in (bar.begin_s, bar.end_s, *(bar.spread_s or ()))]
    least_s, most_s = min(0.0, *ends), max(ends)
    left = max(text_width(bar.name) for bar in bars) + 10
    right = max(text_width(bar.text) for bar in bars) + 14
    names = [("a step", "blue"), ("less", "green"), ("more", "orange")]
    seen = {bar.kind for bar in bars}
    kept = [one for one in names if one[0].split()[-1] in seen]
    canvas = Canvas(width, _TOP + _ROW * len(bars) + 6)
    x = Scale(low=least_s, high=most_s, begin=left, end=width - right)
    top = _TOP + canvas.legend((left, 16), [*kept, ("90 % interval", "error")])
    for place, bar in enumerate(bars):
        _row(canvas, bar, top + place * _ROW, x, is_linked=place + 1 < len(bars))
    return canvas.finished(title, text)


def _row(canvas: Canvas, bar: _Bar, top: int, x: Scale, *, is_linked: bool) -> None:
    low, high = sorted((x(bar.begin_s), x(bar.end_s)))
    middle, edge = top + _ROW / 2, top + (_ROW - _BAR) / 2
    canvas.text((x(x.low) - 8, middle + 4), bar.name, anchor="end")
    canvas.rect((low, edge), (max(1.0, high - low), _BAR), _HUES[bar.kind])
    right = high
    if bar.spread_s is not None:
        first, last = (x(end) for end in bar.spread_s)
        right = max(right, last)
        canvas.line((first, middle), (last, middle), "error")
    if is_linked:
        at = x(bar.end_s)
        canvas.line((at, edge + _BAR), (at, edge + _ROW), "grid")
    canvas.text((right + 6, middle + 4), bar.text, "faint")
