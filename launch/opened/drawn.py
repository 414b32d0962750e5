"""The parts of an answer on a terminal, as text, as Markdown and as HTML."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from textwrap import wrap
from typing import TypeAlias

from ..report.table import ReportTable, console, markdown_lines, show_table

Part: TypeAlias = "ReportTable | str"
"""A table, a line of text, or several lines that stand as they are."""
_LINES, _COLUMNS = 24, 80
"""Lines and columns of a small screen."""
_CELL = "text-align: {}; white-space: nowrap"


def print_parts(parts: Iterable[Part]) -> None:
    """Print an answer; a narrow terminal goes without the spare columns of tables."""
    out = console()
    for part in parts:
        if isinstance(part, ReportTable):
            show_table(part, out)
        else:
            print(part)


def text_of(parts: Iterable[Part], columns: int = 0) -> str:
    """The same as text, without colours; 0 columns: as wide as standard output."""
    file = io.StringIO()
    out = console(file)
    out.width = columns or out.width
    for part in parts:
        if isinstance(part, ReportTable):
            show_table(part, out)
        else:
            print(part, file=file)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def screen_of(parts: Iterable[Part]) -> str:
    """The same within a small screen, with all that has no room there left out at the end."""
    wide = text_of(parts, _COLUMNS).splitlines()
    lines = [part for line in wide for part in wrap(line, _COLUMNS, drop_whitespace=False) or [""]]
    if len(lines) > _LINES:
        lines[_LINES - 1 :] = ["... print() shows all of it"]
    return "\n".join(line.rstrip() for line in lines)


def markdown_of(parts: Iterable[Part]) -> str:
    """The same as Markdown: a heading over each table, several lines as they are."""
    found: list[str] = []
    for part in parts:
        if isinstance(part, ReportTable):
            found += [*markdown_lines(part), ""]
        elif part.strip():
            found += ["```", part, "```", ""] if "\n" in part else [part, ""]
    return "\n".join(found)


def html_of(parts: Iterable[Part]) -> str:
    """The same as HTML that needs no style sheet; all that is told is escaped."""
    from html import escape  # its names of signs are slow to import, and no verb needs them

    found: list[str] = []
    for part in parts:
        if isinstance(part, ReportTable):
            found.append(_table(part, escape))
        elif part.strip():
            tag = "pre" if "\n" in part else "p"
            found.append(f"<{tag}>{escape(part)}</{tag}>")
    return "\n".join(found)


def _table(table: ReportTable, escape: Callable[[str], str]) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        found = []
        for place, cell in enumerate(cells):
            style = _CELL.format("right" if place else "left")
            found.append(f'<{tag} style="{style}">{escape(cell)}</{tag}>')
        return f"<tr>{''.join(found)}</tr>"

    body = "\n".join(row(cells, "td") for cells in table.rows)
    return (
        f"<table>\n<caption>{escape(table.title)}</caption>\n"
        f"<thead>{row(table.columns, 'th')}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    )
