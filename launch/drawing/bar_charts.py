"""Bars with names on their left: work of a step, and waiting by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...calib.steps import Contribution
from ...calib.units import format_frac, format_time
from .axes import Scale
from .canvas import Canvas, Drawing, elided, text_width

NUM_BARS = 24
_ROW, _BAR, _TOP = 22, 14, 27


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A name, a bar from one value to another, and what stands behind it."""

    name: str
    end: float
    text: str
    hue: str = "blue"
    begin: float = 0.0
    spread: tuple[float, float] | None = None
    """Where the 90 % interval of the end lies."""


def work_chart(found: Sequence[Contribution], step_time_s: float, width: int) -> Drawing | None:
    """What the critical stage works on, by its share of the step; what is small shares a bar."""
    works = sorted(found, key=lambda one: -one.time_s)
    bars = [
        Bar(
            name=f"{one.name} {one.phase}".strip(),
            end=one.time_s,
            text=f"{format_frac(one.time_s / step_time_s)} · {format_time(one.time_s)}",
            hue="blue" if one.phase else "green",
        )
        for one in works[:NUM_BARS]
    ]
    if rest_s := sum(one.time_s for one in works[NUM_BARS:]):
        text = f"{format_frac(rest_s / step_time_s)} · {format_time(rest_s)}"
        number = len(works) - NUM_BARS
        bars.append(Bar(name=f"{number} others", end=rest_s, text=text, hue="grey"))
    names = [("operators", "blue"), ("transfers, before overlap", "green")]
    whole = f"a simulated step of {format_time(step_time_s)}"
    return bars_chart(f"Work of the critical stage, as shares of {whole}", bars, names, width)


def waiting_chart(waits_s: Mapping[int, float], width: int) -> Drawing | None:
    """How long each rank stands still for later ones; of many those that wait least and most."""
    ranks = sorted(waits_s, key=lambda rank: waits_s[rank])
    if len(ranks) > NUM_BARS:
        ranks = [*ranks[: NUM_BARS // 2], *ranks[-NUM_BARS // 2 :]]
    bars = [
        Bar(name=f"rank {rank}", end=waits_s[rank], text=format_time(waits_s[rank]))
        for rank in sorted(ranks)
    ]
    return bars_chart("Waiting for later ranks, in each step", bars, [], width)


def bars_chart(
    title: str, bars: Sequence[Bar], names: Sequence[tuple[str, str]], width: int
) -> Drawing | None:
    """A row for each bar; None without bars that have a length."""
    most = max((bar.end for bar in bars), default=0.0)
    if most <= 0:
        return None
    left, right = margins(bars)
    left = min(0.4 * width, left)
    top = _TOP if names else 5
    canvas = Canvas(width, top + 3 + _ROW * len(bars) + 8)
    if names:
        top += canvas.legend((left, 16), names)
    x = Scale(low=0.0, high=most, begin=left, end=width - right)
    for place, bar in enumerate(bars):
        draw_bar(canvas, bar, x, top + place * _ROW)
    return canvas.finished(title, "; ".join(f"{bar.name} {bar.text}" for bar in bars[:6]))


def margins(bars: Sequence[Bar]) -> tuple[float, float]:
    """Room for the longest name on the left, and for the longest text on the right."""
    left = max(text_width(bar.name) for bar in bars) + 10
    return left, max(text_width(bar.text) for bar in bars) + 14


def draw_bar(canvas: Canvas, bar: Bar, x: Scale, top: float) -> None:
    """One row: name, bar, interval where there is one, and text."""
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
