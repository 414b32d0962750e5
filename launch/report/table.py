"""A table of a report, as text, and on a terminal."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import IO, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

_Row = TypeVar("_Row")
WIDTH = 200
"""Of output into a file: the widest table of the report has room."""
_GAP = 2
"""Characters between columns."""
_LEAST_FOLDED = 12
"""Characters of a column that takes several lines; a label's words have fewer."""
_NEVER = "step"
"""The column that no screen is too narrow for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A titled table of text; ``key`` names it on W&B, where no two columns may have one name."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    spare: tuple[str, ...] = ()
    """Columns that a narrow screen does without, the first to go first."""
    late: tuple[str, ...] = ()
    """Those that go once the folded column has no room left."""
    folded: str = ""
    """The column whose cells may take several lines; empty: the first."""

    def sparing(self, *names: str, late: tuple[str, ...] = (), folded: str = "") -> ReportTable:
        """The same, with columns that a narrow screen may leave out, and one that it may fold."""
        return replace(self, spare=names, late=late, folded=folded)

    def within(self, width: int) -> ReportTable:
        """The same without as many columns as have to go to fit in a width.

        The spare ones go first, then one column folds, then the late ones go, and those on the
        right.  The first two, the folded one and the step stay.
        """
        found = self
        for name in filter(self.columns.__contains__, self.spare):
            if found.width <= width:
                return found
            found = found._without(name)
        kept = (*self.columns[:2], self.folding, _NEVER, *self.spare, *self.late)
        rest = [name for name in reversed(self.columns) if name not in kept]
        for name in filter(self.columns.__contains__, (*self.late, *rest)):
            if found.width <= width or found.fold_width(width) >= _LEAST_FOLDED:
                return found
            found = found._without(name)
        return found

    @property
    def folding(self) -> str:
        """The column that may fold."""
        return self.folded if self.folded in self.columns else self.columns[0]

    @property
    def width(self) -> int:
        """Characters of the widest line, with headers over several lines."""
        return sum(self.widths().values()) + _GAP * (len(self.columns) - 1)

    def fold_width(self, width: int) -> int:
        """Characters that the other columns leave for the one that folds."""
        return width - self.width + self.widths()[self.folding]

    def widths(self) -> dict[str, int]:
        """Characters of each column; a header counts by its longest word."""
        every = zip(self.columns, *self.rows, strict=True)
        return {name: max(map(cell_len, (*name.split(), *cells))) for name, *cells in every}

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


def console(file: IO[str] | None = None) -> Console:
    """Standard output, or a file in its width; where it is no terminal, wide enough for every
    table.

    There, and where ``NO_COLOR`` is set, nothing but text is written.
    """
    if not sys.stdout.isatty():
        return Console(file=file, width=WIDTH, force_terminal=False, color_system=None)
    return Console(file=file, color_system=None if os.environ.get("NO_COLOR") else "auto")


def markdown_lines(table: ReportTable) -> list[str]:
    """The table in Markdown, under its title as a heading."""
    head = _row(table.columns), _row(("---",) * len(table.columns))
    return [f"## {table.title}", "", *head, *map(_row, table.rows)]


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def show_table(table: ReportTable, out: Console) -> None:
    """Print one table, without what a narrow screen has no room for."""
    table = table.within(out.width)
    widths = table.widths()
    if table.width > out.width:
        widths[table.folding] = max(1, table.fold_width(out.width))
    whole = sum(max(widths[name], cell_len(name)) + _GAP for name in table.columns) - _GAP
    drawn = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for place, column in enumerate(table.columns):
        header = column if whole <= out.width else _tall(column, widths[column])
        is_folded = column == table.folding and table.width > out.width
        drawn.add_column(
            header,
            justify="right" if place and column != table.folding else "left",
            no_wrap=not is_folded,
            overflow="fold" if is_folded else "ellipsis",
            width=widths[column] if is_folded else None,
        )
    for row in table.rows:
        drawn.add_row(*row)
    # As a title of the table it would be broken at the table's width.
    out.print(Text(table.title, style="table.title"))
    out.print(drawn)


def _tall(header: str, width: int) -> str:
    """A header over as many lines as it needs.

    >>> _tall("against running", 8)
    'against\\nrunning'
    """
    return "\n".join(textwrap.wrap(header, width, break_long_words=False))
