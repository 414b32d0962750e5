"""Lines of a terminal as one SVG, animated by their timing; static for reduced motion."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from forerun.launch.views import DARK

_ROW, _LEFT, _TOP, _CHARACTER = 19, 18, 46, 7.83
_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_HOLD_S = 6.0
"""Seconds that the complete text stays before the animation restarts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedLine:
    """A line and its time, in seconds of the picture."""

    at_s: float
    text: str
    is_typed: bool = False
    """True if typed by the user."""


def terminal_svg(lines: Sequence[TimedLine], *, title: str, columns: int = 112) -> str:
    """Return an animated picture of a terminal; long lines wrap, indented by four characters.

    Raises ``ValueError`` without lines.
    """
    if not lines:
        raise ValueError("a terminal without lines shows nothing")
    rows = [
        (line, text)
        for line in lines
        for text in textwrap.wrap(
            line.text, columns, subsequent_indent="    ", break_on_hyphens=False
        )
        or [""]
    ]
    length_s = max(line.at_s for line in lines) + _HOLD_S
    width = round(2 * _LEFT + columns * _CHARACTER)
    height = _TOP + _ROW * len(rows) + 10
    times = {line.at_s: f"a{place}" for place, line in enumerate(lines)}
    shown = [
        f".{name} {{ animation: {name} {length_s:g}s infinite; }} @keyframes {name} {{ 0%, "
        f"{100 * at_s / length_s:.2f}% {{ opacity: 0; }} {100 * at_s / length_s + 0.01:.2f}%, "
        "100% { opacity: 1; } }"
        for at_s, name in times.items()
    ]
    texts = [
        f'<text class="{times[line.at_s]}{" typed" * line.is_typed}" x="{_LEFT}" '
        f'y="{_TOP + 12 + place * _ROW}" xml:space="preserve">{escape(text)}</text>'
        for place, (line, text) in enumerate(rows)
    ]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>text {{ font: 13px {_FONT}; fill: {DARK['ink']}; }} "
            f".typed {{ fill: {DARK['green']}; }}",
            "@media (prefers-reduced-motion: no-preference) {",
            *shown,
            "}</style>",
            f'<rect width="100%" height="100%" rx="9" fill="{DARK["page"]}"/>',
            *(
                f'<circle cx="{_LEFT + 6 + 20 * place}" cy="20" r="6" fill="{DARK[hue]}"/>'
                for place, hue in enumerate(("orange", "amber", "green"))
            ),
            *texts,
            "</svg>",
            "",
        )
    )
