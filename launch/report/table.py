"""A table of a report, as text, and on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

_Row = TypeVar("_Row")
WIDTH = 140
"""Of output into a file: the widest table of the report has room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A titled table of text; ``key`` names it on W&B, where no two columns may have one name."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def table_of(
    key: str, title: str, found: Iterable[_Row], cells: Mapping[str, Callable[[_Row], str]]
) -> ReportTable:
    """A table with a row for each of ``found``, and a column for each way to read one."""
    rows = tuple(tuple(cell(row) for cell in cells.values()) for row in found)
    return ReportTable(key=key, title=title, columns=tuple(cells), rows=rows)


def console() -> Console:
    """Standard output; where it is no terminal, wide enough for every table."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def show_table(table: ReportTable, out: Console) -> None:
    """Print one table."""
    drawn = Table(
        title=table.title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for place, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*row)
    out.print(drawn)
