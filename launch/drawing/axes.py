"""From values to pixels, and where an axis has its ticks."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from .canvas import Canvas, Point, text_width

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_MOMENTS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
_DAY_S = 86400
_YEAR_S = 366 * _DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A range of values on a range of pixels."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        if self.high == self.low:
            return (self.begin + self.end) / 2
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A value on an axis and what stands beside it."""

    value: float
    text: str


def padded(values: Iterable[float], share: float = 0.06) -> tuple[float, float]:
    """The least and the most of some values with room around them."""
    found = [value for value in values if math.isfinite(value)]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    room = (high - low) * share or abs(high) * share or 1.0
    return low - room, high + room


def round_ticks(low: float, high: float, most: int, *, factor: float = 1.0) -> list[Tick]:
    """At most so many round values; texts are those of ``value * factor``.

    >>> [tick.text for tick in round_ticks(0.0, 1.0, 6)]
    ['0', '0.2', '0.4', '0.6', '0.8', '1']
    """
    low, high = low * factor, high * factor
    span = high - low
    # Closer than doubles of full precision are, no tick is round.
    if not math.isfinite(span) or span < sys.float_info.min * most:
        return []
    rough = span / max(1, most - 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * next(one for one in _STEPS if one * size >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    found = [(first + place) * step for place in range(count)]
    return [Tick(value=one / factor, text=f"{round(one, 9):,.6g}") for one in found]


def moment_ticks(low: float, high: float, most: int) -> list[Tick]:
    """At most so many round moments of UTC between two, in seconds since 1970."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return []
    steps = (*_MOMENTS_S, *(_DAY_S * n for n in (1, 2, 7, 14, 28, 91, 365, 3650, 36500)))
    step = next((one for one in steps if span / one <= most - 1), steps[-1])
    first = math.ceil(low / step)
    found = [(first + place) * step for place in range(int(high // step) - first + 1)]
    return [Tick(value=one, text=moment_text(one, step, span)) for one in found]


def moment_text(unix_s: float, step_s: float = 60, span_s: float = 0.0) -> str:
    """A moment in UTC, as short as a distance between ticks allows.

    >>> moment_text(0.0), moment_text(0.0, step_s=86400), moment_text(1.0, step_s=1)
    ('00:00', '1 Jan', '00:00:01')
    """
    try:
        found = datetime.fromtimestamp(unix_s, tz=timezone.utc)
    except (ValueError, OverflowError, OSError):
        return "never"
    if span_s > _YEAR_S:
        return f"{found.day} {found:%b %Y}"
    if step_s >= _DAY_S:
        return f"{found.day} {found:%b}"
    clock = f"{found:%H:%M:%S}" if step_s < 60 else f"{found:%H:%M}"
    return f"{found:%a} {clock}" if span_s >= _DAY_S else clock


def draw_axes(
    canvas: Canvas,
    x: Scale,
    y: Scale,
    ticks: tuple[Sequence[Tick], Sequence[Tick]],
    titles: tuple[str, str],
) -> None:
    """Grid, ticks and titles; that of the upright axis lies above it."""
    for tick in ticks[1]:
        at = y(tick.value)
        canvas.line((x.begin, at), (x.end, at), "grid")
        canvas.text((x.begin - 8, at + 4), tick.text, "faint", anchor="end")
    for tick in ticks[0]:
        at = x(tick.value)
        canvas.line((at, y.begin), (at, y.begin + 4), "grid")
        canvas.text((at, y.begin + 18), tick.text, "faint", anchor="middle")
    canvas.text((x.end, y.begin + 36), titles[0], "faint", anchor="end")
    canvas.text((4, y.end - 12), titles[1], "faint")


def most_ticks(width: float, example: str) -> int:
    """How many texts like this have room beside one another."""
    return max(2, int(width / (text_width(example) + 18)))


def seconds_unit(most_s: float) -> tuple[float, str]:
    """Factor and name of the unit in which times up to this are read best."""
    if most_s >= 1.0:
        return 1.0, "s"
    return (1e3, "ms") if most_s >= 1e-3 else (1e6, "µs")


def on(x: Scale, y: Scale, at: Iterable[float], values: Iterable[float]) -> list[Point]:
    """Points of values over others."""
    return [(x(one), y(value)) for one, value in zip(at, values, strict=True)]
