"""A table of a report, as text, and on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

_Row = TypeVar("_Row")
WIDTH = 200
"""Of output into a file: the widest table of the report has room."""
_GAP = 3
"""Characters between columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A titled table of text; ``key`` names it on W&B, where no two columns may have one name."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    spare: tuple[str, ...] = ()
    """Columns that a narrow screen does without, the first to go first."""

    def sparing(self, *names: str) -> ReportTable:
        """The same, with columns that a narrow screen may leave out."""
        return replace(self, spare=names)

    def within(self, width: int) -> ReportTable:
        """The same without as many of the spare columns as have to go to fit in a width."""
        found, left = self, list(self.spare)
        while left and found._width() > width:
            found = found._without(left.pop(0))
        return found

    def _width(self) -> int:
        """Characters of the widest line, two between columns."""
        lines = zip(self.columns, *self.rows, strict=True)
        return sum(max(map(cell_len, cells)) + _GAP for cells in lines) - _GAP

    def _without(self, name: str) -> ReportTable:
        kept = [place for place, column in enumerate(self.columns) if column != name]
        columns, *rows = (tuple(row[p] for p in kept) for row in (self.columns, *self.rows))
        return replace(self, columns=columns, rows=tuple(rows))


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
    """Print one table, without its spare columns where the screen is too narrow for them."""
    table = table.within(out.width)
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
