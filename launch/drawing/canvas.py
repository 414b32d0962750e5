"""A drawing as it grows, in pixels from the upper left corner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from .style import CHART, schemes

_CHARACTER = 7.8
"""Pixels of a character at 13 pixels, on the wide side of what fonts of systems have."""
_SIGN, _BETWEEN = 22, 14
"""Pixels of a sign of a legend, and between two names."""
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A finished chart."""

    title: str
    text: str
    """What it shows, in a sentence, for who does not see it."""
    width: int
    height: int
    body: str

    def inline(self, key: str) -> str:
        """For a page, which has ``style.CHART`` and its colours; ``key`` is its own on the page."""
        return self._svg(f' aria-labelledby="{key}-t {key}-d"', key, "")

    def alone(self) -> str:
        """For a file: its style is inside, and its page is drawn."""
        style = f"<style>{schemes('svg')}{CHART}\n.paper {{ fill: var(--page); }}</style>"
        paper = '<rect class="paper" width="100%" height="100%"/>'
        return self._svg(' xmlns="http://www.w3.org/2000/svg"', "chart", style + paper) + "\n"

    def _svg(self, attributes: str, key: str, before: str) -> str:
        return (
            f'<svg class="chart" role="img"{attributes} viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}"><title id="{key}-t">'
            f'{escape(self.title)}</title><desc id="{key}-d">{escape(self.text)}</desc>'
            f"{before}{self.body}</svg>"
        )


class Canvas:
    """Takes shapes; a ``kind`` is one or more classes of ``style.CHART``."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def text(
        self, at: Point, text: str, kind: str = "", *, anchor: str = "start", shown: str = ""
    ) -> None:
        """Text with its base line at a point; ``shown`` is what a pointer on it tells."""
        held = f"<title>{escape(shown)}</title>" if shown else ""
        ends = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(f"<text{_at(at)}{ends}{_class(kind)}>{escape(text)}{held}</text>")

    def rect(self, at: Point, size: Point, kind: str, *, shown: str = "") -> None:
        """A bar from its upper left corner."""
        sizes = f'width="{_px(max(0.0, size[0]))}" height="{_px(size[1])}"'
        shape = f"<rect{_at(at)} {sizes}{_class(kind)}"
        self._parts.append(
            f"{shape}><title>{escape(shown)}</title></rect>" if shown else f"{shape}/>"
        )

    def line(self, begin: Point, end: Point, kind: str) -> None:
        """A straight line."""
        self.path([begin, end], kind)

    def path(self, points: Sequence[Point], kind: str) -> None:
        """A line through points; nothing where there are none."""
        if points:
            self._parts.append(f'<path d="{_through(points)}"{_class(kind)}/>')

    def area(self, upper: Sequence[Point], lower: Sequence[Point], kind: str) -> None:
        """What lies between two lines from left to right."""
        if upper:
            around = _through([*upper, *reversed(lower)])
            self._parts.append(f'<path d="{around}Z"{_class(kind)}/>')

    def dots(self, points: Sequence[Point], kind: str) -> None:
        """A dot at each point, all of them one shape."""
        if points:
            marks = "".join(f"M{_px(x)} {_px(y)}h0" for x, y in points)
            self._parts.append(f'<path d="{marks}"{_class(kind)}/>')

    def ring(self, at: Point, radius: float, kind: str, *, shown: str = "") -> None:
        """A circle."""
        held = f"<title>{escape(shown)}</title>" if shown else ""
        x, y = map(_px, at)
        self._parts.append(
            f'<circle cx="{x}" cy="{y}" r="{_px(radius)}"{_class(kind)}>{held}</circle>'
        )

    def legend(self, at: Point, names: Sequence[tuple[str, str]]) -> int:
        """Names with the shapes that they stand for, in rows.

        The drawing grows by all rows but the first; returned is by how much, for what is below.
        """
        x, y = at
        for name, kind in names:
            wide = _SIGN + text_width(name)
            if x > at[0] and x + wide > self.width - 4:
                x, y = at[0], y + 20
            if kind.endswith(("-line", "dashed", "limit", "error")):
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
        """The drawing."""
        return Drawing(
            title=title,
            text=text,
            width=self.width,
            height=self.height,
            body="".join(self._parts),
        )


def text_width(text: str) -> float:
    """Pixels that a text takes at most, in most fonts."""
    return _CHARACTER * len(text)


def elided(text: str, width: float) -> str:
    """As much of a text as has room.

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
