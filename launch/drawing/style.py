"""Colours and type of charts, for light and dark pages and for paper.

Hues are those of Okabe and Ito (2008), "Color Universal Design", darkened on white until each has a
contrast of 3 to 1 (WCAG 2.1, 1.4.11); no chart tells two things apart by hue alone.
"""

from __future__ import annotations

from collections.abc import Mapping

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
LIGHT: Mapping[str, str] = {
    "ink": "#1c2024",
    "faint": "#5a6169",
    "page": "#ffffff",
    "panel": "#f5f6f8",
    "line": "#d9dde2",
    "blue": "#0072b2",
    "orange": "#c14e00",
    "amber": "#a86a00",
    "green": "#00785a",
    "purple": "#a04f83",
    "grey": "#747b84",
}
DARK: Mapping[str, str] = {
    "ink": "#e8eaed",
    "faint": "#a9b0b8",
    "page": "#15181c",
    "panel": "#1e2227",
    "line": "#3a4048",
    "blue": "#56b4e9",
    "orange": "#f28c4e",
    "amber": "#e6b045",
    "green": "#3fc79a",
    "purple": "#d99bc3",
    "grey": "#949ba4",
}
HUES = ("blue", "orange", "amber", "green", "purple", "grey")


def variables(colours: Mapping[str, str]) -> str:
    """The colours as custom properties of CSS."""
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def schemes(selector: str) -> str:
    """CSS that gives ``selector`` the colours of the reader's scheme; paper is white."""
    return (
        f"{selector} {{ color-scheme: light dark; {variables(LIGHT)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ {selector} {{ {variables(DARK)} }} }}\n"
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
        ".chart .dashed { stroke-dasharray: 6 4; }",
        ".chart .ring { fill: none; stroke: var(--ink); stroke-width: 2; }",
        ".chart .bar { stroke: var(--page); stroke-width: .6; }",
    )
)
"""How the parts of a chart look, by their classes."""
