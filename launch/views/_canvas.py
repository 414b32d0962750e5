"""Canvas and plots for SVG charts, in pixels from the upper left corner."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from xml.sax.saxutils import escape, quoteattr

from ...calib.records.files import MARKUP_COMMENT

_CHARACTER = 7.8
"""Width of a character at 13 pixels, in pixels; an upper estimate for system fonts."""
_SIGN, _BETWEEN = 22, 14
"""Width of a legend symbol, and gap between two names, in pixels."""
_PLOT_TOP, _BOTTOM, _RIGHT = 52, 44, 22
"""Margins of a plot, in pixels."""
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Finished chart."""

    title: str
    text: str
    """Content in one sentence, for screen readers."""
    width: int
    height: int
    body: str

    def inline(self, key: str) -> str:
        """Return SVG for a page that has ``CHART`` and its colours; ``key`` is unique on the
        page."""
        return self._svg(f' aria-labelledby="{key}-t {key}-d"', key, "")

    def alone(self) -> str:
        """Return SVG for a file, with its style and a background."""
        style = f"<style>{schemes('svg')}{CHART}\n.paper {{ fill: var(--page); }}</style>"
        paper = '<rect class="paper" width="100%" height="100%"/>'
        whole = self._svg(' xmlns="http://www.w3.org/2000/svg"', "chart", style + paper)
        return whole + MARKUP_COMMENT

    def _svg(self, attributes: str, key: str, before: str) -> str:
        return (
            f'<svg class="chart" role="img"{attributes} viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}"><title id="{key}-t">'
            f'{escape(self.title)}</title><desc id="{key}-d">{escape(self.text)}</desc>'
            f"{before}{self.body}</svg>"
        )


class Canvas:
    """Collects shapes; a ``kind`` is one or more classes of ``CHART``."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def text(
        self, at: Point, text: str, kind: str = "", *, anchor: str = "start", shown: str = ""
    ) -> None:
        """Add text with its baseline at a point; ``shown`` is its tooltip."""
        title = f"<title>{escape(shown)}</title>" if shown else ""
        ends = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(f"<text{_at(at)}{ends}{_class(kind)}>{escape(text)}{title}</text>")

    def rect(self, at: Point, size: Point, kind: str) -> None:
        """Add a rectangle by its upper left corner."""
        sizes = f'width="{_px(max(0.0, size[0]))}" height="{_px(size[1])}"'
        self._parts.append(f"<rect{_at(at)} {sizes}{_class(kind)}/>")

    def line(self, begin: Point, end: Point, kind: str) -> None:
        """Add a straight line."""
        self.path([begin, end], kind)

    def path(self, points: Sequence[Point], kind: str) -> None:
        """Add a line through points, if there are any."""
        if points:
            self._parts.append(f'<path d="{_through(points)}"{_class(kind)}/>')

    def area(self, upper: Sequence[Point], lower: Sequence[Point], kind: str) -> None:
        """Add the area between two lines that run from left to right."""
        if upper:
            around = _through([*upper, *reversed(lower)])
            self._parts.append(f'<path d="{around}Z"{_class(kind)}/>')

    def dots(self, points: Sequence[Point], kind: str) -> None:
        """Add a dot at each point, as a single shape."""
        if points:
            marks = "".join(f"M{_px(x)} {_px(y)}h0" for x, y in points)
            self._parts.append(f'<path d="{marks}"{_class(kind)}/>')

    def ring(self, at: Point, radius: float, kind: str) -> None:
        """Add a circle."""
        x, y = map(_px, at)
        self._parts.append(f'<circle cx="{x}" cy="{y}" r="{_px(radius)}"{_class(kind)}/>')

    def legend(self, at: Point, names: Sequence[tuple[str, str]]) -> int:
        """Add names with their symbols, in rows.

        The canvas grows by all rows but the first; returns that height, to shift the content below.
        """
        x, y = at
        for name, kind in names:
            wide = _SIGN + text_width(name)
            if x > at[0] and x + wide > self.width - 4:
                x, y = at[0], y + 20
            if kind.endswith(("-line", "limit", "error")):
                self.line((x, y - 4), (x + 14, y - 4), kind)
            elif kind.endswith("-ring"):
                self.ring((x + 7, y - 4), 4, kind)
            elif "-dots" in kind:
                self.dots([(x + 7, y - 4)], kind)
            else:
                self.rect((x, y - 10), (14, 11), kind)
            self.text((x + 20, y), name, "faint")
            x += wide + _BETWEEN
        more = round(y - at[1])
        self.height += more
        return more

    def finished(self, title: str, text: str) -> Drawing:
        """Return the drawing."""
        return Drawing(
            title=title,
            text=text,
            width=self.width,
            height=self.height,
            body="".join(self._parts),
        )


def text_width(text: str) -> float:
    """Return an upper estimate of a text's width, in pixels."""
    return _CHARACTER * len(text)


def elided(text: str, width: float) -> str:
    """Return a text cut to a width in pixels.

    >>> elided("attention", 200.0), elided("attention", 40.0)
    ('attention', 'atte…')
    """
    most = int(width / _CHARACTER)
    return text if len(text) <= most else text[: max(0, most - 1)] + "…"


def _through(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{_px(x)} {_px(y)}" for x, y in points)


def _px(value: float) -> str:
    return f"{round(value, 1):g}"


def _at(at: Point) -> str:
    return f' x="{_px(at[0])}" y="{_px(at[1])}"'


def _class(kind: str) -> str:
    return f" class={quoteattr(kind)}" if kind else ""


FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_COLOURS = {
    "ink": ("#1c2024", "#e8eaed"),
    "faint": ("#5a6169", "#a9b0b8"),
    "page": ("#ffffff", "#15181c"),
    "panel": ("#f5f6f8", "#1e2227"),
    "line": ("#d9dde2", "#3a4048"),
    "blue": ("#0072b2", "#56b4e9"),
    "orange": ("#c14e00", "#f28c4e"),
    "green": ("#00785a", "#3fc79a"),
    "grey": ("#747b84", "#949ba4"),
}
LIGHT: Mapping[str, str] = {name: light for name, (light, _) in _COLOURS.items()}
DARK: Mapping[str, str] = {name: dark for name, (_, dark) in _COLOURS.items()}
HUES = ("blue", "orange", "green", "grey")


def schemes(selector: str) -> str:
    """Return CSS that gives ``selector`` the reader's light or dark colours; print is light."""
    light, dark = (
        " ".join(f"--{name}: {value};" for name, value in one.items()) for one in (LIGHT, DARK)
    )
    return (
        f"{selector} {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ {selector} {{ {dark} }} }}\n"
    )


CHART = "\n".join(
    (
        f".chart {{ font: 13px {FONT}; font-variant-numeric: tabular-nums; }}",
        ".chart text { fill: var(--ink); }",
        ".chart .faint { fill: var(--faint); font-size: 12px; }",
        ".chart .strong { font-weight: 600; }",
        ".chart .grid { stroke: var(--line); stroke-width: 1; fill: none; }",
        ".chart .limit { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 6 4; }",
        ".chart .error { stroke: var(--ink); stroke-width: 1.4; opacity: .6; }",
        *(f".chart .{hue} {{ fill: var(--{hue}); }}" for hue in HUES),
        *(
            f".chart .{hue}-line {{ stroke: var(--{hue}); stroke-width: 1.8; fill: none; "
            "stroke-linejoin: round; }"
            for hue in HUES
        ),
        *(
            f".chart .{hue}-dots {{ stroke: var(--{hue}); stroke-width: 4.5; fill: none; "
            "stroke-linecap: round; }"
            for hue in HUES
        ),
        *(f".chart .{hue}-band {{ fill: var(--{hue}); opacity: .18; }}" for hue in HUES),
        ".chart .grey-ring { fill: var(--page); stroke: var(--grey); stroke-width: 2; }",
        ".chart .large { stroke-width: 8; }",
        ".chart .ring { fill: none; stroke: var(--ink); stroke-width: 2; }",
    )
)
"""Styles of chart elements, by class."""


_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_MOMENTS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
_DAY_S = 86400
_YEAR_S = 366 * _DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Linear map from a range of values to a range of pixels."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        if self.high == self.low:
            return (self.begin + self.end) / 2
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Value on an axis, with its label."""

    value: float
    text: str


def padded(values: Iterable[float], share: float = 0.06) -> tuple[float, float]:
    """Return the range of the finite values, widened by a margin."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    margin = (high - low) * share or abs(high) * share or 1.0
    return low - margin, high + margin


def round_ticks(low: float, high: float, most: int, *, factor: float = 1.0) -> list[Tick]:
    """Return at most ``most`` round values; labels are of ``value * factor``.

    >>> [tick.text for tick in round_ticks(0.0, 1.0, 6)]
    ['0', '0.2', '0.4', '0.6', '0.8', '1']
    """
    low, high = low * factor, high * factor
    span = high - low
    # No round ticks exist below the precision of normal doubles.
    if not math.isfinite(span) or span < sys.float_info.min * most:
        return []
    rough = span / max(1, most - 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * next(one for one in _STEPS if one * size >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    values = [(first + place) * step for place in range(count)]
    return [Tick(value=one / factor, text=f"{round(one, 9):,.6g}") for one in values]


def moment_ticks(low: float, high: float, most: int) -> list[Tick]:
    """Return at most ``most`` round times in UTC between two, in Unix seconds."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return []
    steps = (*_MOMENTS_S, *(_DAY_S * n for n in (1, 2, 7, 14, 28, 91, 365, 3650, 36500)))
    step = next((one for one in steps if span / one <= most - 1), steps[-1])
    first = math.ceil(low / step)
    values = [(first + place) * step for place in range(int(high // step) - first + 1)]
    return [Tick(value=one, text=moment_text(one, step, span)) for one in values]


def moment_text(unix_s: float, step_s: float = 60, span_s: float = 0.0) -> str:
    """Return a UTC time, as short as the distance between ticks allows.

    >>> moment_text(0.0), moment_text(0.0, step_s=86400), moment_text(1.0, step_s=1)
    ('00:00', '1 Jan', '00:00:01')
    """
    try:
        moment = datetime.fromtimestamp(unix_s, tz=timezone.utc)
    except (ValueError, OverflowError, OSError):
        return "never"
    if span_s > _YEAR_S:
        return f"{moment.day} {moment:%b %Y}"
    if step_s >= _DAY_S:
        return f"{moment.day} {moment:%b}"
    clock = f"{moment:%H:%M:%S}" if step_s < 60 else f"{moment:%H:%M}"
    return f"{moment:%a} {clock}" if span_s >= _DAY_S else clock


class Plot(Canvas):
    """Canvas with a legend above two axes; ``x`` is a range and the longest tick label."""

    def __init__(
        self,
        size: tuple[int, int],
        legend: Sequence[tuple[str, str]],
        x: tuple[tuple[float, float], str],
        y: tuple[float, float],
        titles: tuple[str, str],
        *,
        left: int = 60,
        factor: float = 1.0,
        has_moments: bool = False,
    ) -> None:
        super().__init__(*size)
        top = _PLOT_TOP + self.legend((left, 16), legend)
        (low, high), example = x
        self.x = Scale(low=low, high=high, begin=left, end=self.width - _RIGHT)
        self.y = Scale(low=y[0], high=y[1], begin=self.height - _BOTTOM, end=top)
        ticks = moment_ticks(*y, 6) if has_moments else round_ticks(*y, 6, factor=factor)
        # Grid, ticks and titles; the title of the vertical axis is above it.
        for tick in ticks:
            at = self.y(tick.value)
            self.line((self.x.begin, at), (self.x.end, at), "grid")
            self.text((left - 8, at + 4), tick.text, "faint", anchor="end")
        base, most = self.y.begin, most_ticks(self.x.end - left, example)
        for tick in round_ticks(low, high, most):
            at = self.x(tick.value)
            self.line((at, base), (at, base + 4), "grid")
            self.text((at, base + 18), tick.text, "faint", anchor="middle")
        self.text((self.x.end, base + 36), titles[0], "faint", anchor="end")
        self.text((4, top - 12), titles[1], "faint")

    def on(self, at: Iterable[float], values: Iterable[float]) -> list[Point]:
        """Return the points of values ``values`` at positions ``at``."""
        return [(self.x(one), self.y(value)) for one, value in zip(at, values, strict=True)]

    def band(
        self, at: Sequence[float], lows: Iterable[float], highs: Iterable[float], kind: str
    ) -> None:
        """Add the band between low and high values."""
        self.area(self.on(at, highs), self.on(at, lows), kind)

    def limit(self, *, x: float | None = None, y: float | None = None) -> None:
        """Add a dashed line across the plot at a value."""
        ends = ((self.x.begin, self.y.begin), (self.x.end, self.y.end))
        begin, end = (
            (ex if x is None else self.x(x), ey if y is None else self.y(y)) for ex, ey in ends
        )
        self.line(begin, end, "limit")


def most_ticks(width: float, example: str) -> int:
    """Return how many labels like ``example`` fit into a width, at least 2."""
    return max(2, int(width / (text_width(example) + 18)))


def seconds_unit(most_s: float) -> tuple[float, str]:
    """Return factor and name of the unit suited to times up to ``most_s``."""
    if most_s >= 1.0:
        return 1.0, "s"
    return (1e3, "ms") if most_s >= 1e-3 else (1e6, "µs")
