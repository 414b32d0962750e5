"""Bars with names on their left: work of a step, and waiting by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...calib.steps.estimate import Contribution
from ...calib.units import format_frac, format_time
from .canvas import Canvas, Drawing, elided, text_width

NUM_BARS = 24
_ROW, _BAR, _TOP = 22, 14, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A name, a value, and the value as text."""

    name: str
    value: float
    text: str
    hue: str = "blue"


def work_chart(found: Sequence[Contribution], step_time_s: float, width: int) -> Drawing | None:
    """What the critical stage works on, by its share of the step; what is small shares a bar."""
    works = sorted(found, key=lambda one: -one.time_s)
    bars = [
        Bar(
            name=f"{one.name} {one.phase}".strip(),
            value=one.time_s,
            text=f"{format_frac(one.time_s / step_time_s)} · {format_time(one.time_s)}",
            hue="blue" if one.phase else "green",
        )
        for one in works[:NUM_BARS]
    ]
    if rest_s := sum(one.time_s for one in works[NUM_BARS:]):
        text = f"{format_frac(rest_s / step_time_s)} · {format_time(rest_s)}"
        number = len(works) - NUM_BARS
        bars.append(Bar(name=f"{number} others", value=rest_s, text=text, hue="grey"))
    names = [("operators", "blue"), ("transfers, before overlap", "green")]
    whole = f"a simulated step of {format_time(step_time_s)}"
    return bars_chart(f"Work of the critical stage, as shares of {whole}", bars, names, width)


def waiting_chart(waits_s: Mapping[int, float], width: int) -> Drawing | None:
    """How long each rank stands still for later ones; of many those that wait least and most."""
    ranks = sorted(waits_s, key=lambda rank: waits_s[rank])
    if len(ranks) > NUM_BARS:
        ranks = [*ranks[: NUM_BARS // 2], *ranks[-NUM_BARS // 2 :]]
    bars = [
        Bar(name=f"rank {rank}", value=waits_s[rank], text=format_time(waits_s[rank]))
        for rank in sorted(ranks)
    ]
    return bars_chart("Waiting for later ranks, in each step", bars, [], width)


def bars_chart(
    title: str, bars: Sequence[Bar], names: Sequence[tuple[str, str]], width: int
) -> Drawing | None:
    """A row for each bar; None without bars that have a length."""
    most = max((bar.value for bar in bars), default=0.0)
    if most <= 0:
        return None
    left = min(0.4 * width, max(text_width(bar.name) for bar in bars) + 10)
    right = max(text_width(bar.text) for bar in bars) + 14
    top = _TOP if names else 8
    canvas = Canvas(width, top + _ROW * len(bars) + 8)
    if names:
        top += canvas.legend((left, 16), names)
    for place, bar in enumerate(bars):
        y = top + place * _ROW
        length = bar.value / most * (width - left - right)
        name = elided(bar.name, left - 10)
        canvas.text((left - 8, y + 12), name, anchor="end", shown=bar.name)
        canvas.rect((left, y + 1), (max(1.0, length), _BAR), bar.hue)
        canvas.text((left + max(1.0, length) + 6, y + 12), bar.text, "faint")
    return canvas.finished(title, "; ".join(f"{bar.name} {bar.text}" for bar in bars[:6]))
