"""An explanation drawn as a waterfall: one static SVG, for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from ...calib.advice.explain import Difference, Explained, Explanation, TermTime
from ...calib.timeline.terms import TERM_TEXTS
from ...calib.units import format_time
from .charts import BLUE, GREEN, GREY, ORANGE

_ROW, _BAR = 26, 16
_LEFT, _WIDTH, _RIGHT, _TOP = 150, 560, 110, 64
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_STYLE = f"""
svg {{ font: 13px {_FONT}; --ink: #1c2024; --faint: #60666e; --page: #ffffff; --line: #d5d9de; }}
@media (prefers-color-scheme: dark) {{
  svg {{ --ink: #e8eaed; --faint: #a5abb3; --page: #16191d; --line: #3a4048; }}
}}
.page {{ fill: var(--page); }}
text {{ fill: var(--ink); }}
.faint {{ fill: var(--faint); font-size: 12px; }}
.link {{ stroke: var(--line); }}
.error {{ stroke: var(--ink); stroke-width: 1.4; opacity: 0.55; }}
.step {{ fill: {BLUE}; }} .less {{ fill: {GREEN}; }} .more {{ fill: {ORANGE}; }}
.small {{ fill: {GREY}; }}
"""
_SMALL_FRAC = 0.005
"""Of the longest bar's end: shorter ones share a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    name: str
    kind: str
    begin_s: float
    end_s: float
    text: str
    spread_s: tuple[float, float] | None = None
    """Where the 90 % interval of the end lies."""


def waterfall_svg(found: Explanation) -> str:
    """The terms of a step from 0 to its time, or of a difference from one step to the other."""
    if found.difference is None:
        return _drawn(f"{found.one.label}, a step", list(_of_one(found.one)))
    against = found.difference
    title = f"A: {against.one.label} · B: {against.other.label}"
    return _drawn(title, list(_of_two(against)))


def _of_one(one: Explained) -> Iterator[_Bar]:
    yield from _falling(one.terms, 0.0, one.estimate.time_s, is_signed=False)
    yield _step("step", one)


def _of_two(found: Difference) -> Iterator[_Bar]:
    yield _step("B", found.other)
    start_s = found.other.estimate.time_s
    longest_s = max(start_s, found.one.estimate.time_s)
    yield from _falling(found.terms, start_s, longest_s, is_signed=True)
    yield _step("A", found.one)


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


def _drawn(title: str, bars: Sequence[_Bar]) -> str:
    ends = [end for bar in bars for end in (bar.begin_s, bar.end_s, *(bar.spread_s or ()))]
    least_s, most_s = min(0.0, *ends), max(ends)
    per_s = _WIDTH / (most_s - least_s)
    height = _TOP + _ROW * len(bars) + 16
    width = _LEFT + _WIDTH + _RIGHT
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        '<rect class="page" width="100%" height="100%"/>',
        f'<text x="16" y="26" font-weight="600">{escape(title)}</text>',
        '<text class="faint" x="16" y="46">lines: 90 % intervals of each term by itself</text>',
    ]
    for place, bar in enumerate(bars):
        is_linked = place + 1 < len(bars)
        body += _row(bar, _TOP + place * _ROW, per_s, least_s, is_linked=is_linked)
    return "\n".join([*body, "</svg>", ""])


def _row(bar: _Bar, top: int, per_s: float, least_s: float, *, is_linked: bool) -> Iterator[str]:
    def x(time_s: float) -> float:
        return round(_LEFT + (time_s - least_s) * per_s, 1)

    low, high = sorted((x(bar.begin_s), x(bar.end_s)))
    middle = top + _ROW / 2
    edge = top + (_ROW - _BAR) / 2
    yield f'<text x="{_LEFT - 10}" y="{middle + 4}" text-anchor="end">{escape(bar.name)}</text>'
    yield (
        f'<rect class="{bar.kind}" x="{low}" y="{edge}" width="{max(1.0, round(high - low, 1))}" '
        f'height="{_BAR}" rx="2"/>'
    )
    right = high
    if bar.spread_s is not None:
        first, last = (x(end) for end in bar.spread_s)
        right = max(right, last)
        yield f'<line class="error" x1="{first}" x2="{last}" y1="{middle}" y2="{middle}"/>'
    if is_linked:
        at = x(bar.end_s)
        yield (f'<line class="link" x1="{at}" x2="{at}" y1="{edge + _BAR}" y2="{edge + _ROW}"/>')
    yield f'<text x="{right + 8}" y="{middle + 4}">{escape(bar.text)}</text>'
