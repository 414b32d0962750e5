"""A table of a report, as text, and on a terminal."""

from __future__ import annotations

import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, TypeAlias, TypeVar

from ...calib.units import format_bytes, format_count, format_frac, format_time
from ...hooks.process import is_installed

if not is_installed("rich"):  # told before anything of a directory
    raise ImportError("tables need rich; pip install 'forerun[analysis]'")

if TYPE_CHECKING:  # rich is slow to import, and programs read JSON
    from rich.console import Console

_Row = TypeVar("_Row")
COLUMNS = 80
"""Of a usual terminal, which sentences fit wherever they go."""
_LINES = 24
"""Of a small screen."""
_UNIT = r"(?<=\d) (?=(?:s|ms|us|min|h)\b|%)"
"""The space between a number and its unit, where no line ends."""
_NO_BREAK_SPACE = "\u00a0"
"""A space at which no line ends."""
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

    def with_spare_columns(
        self, *names: str, late: tuple[str, ...] = (), folded: str = ""
    ) -> ReportTable:
        """The same, with columns that a narrow screen may leave out, and one that it may fold."""
        return replace(self, spare=names, late=late, folded=folded)

    def fit_to_width(self, width: int) -> ReportTable:
        """The same without as many columns as have to go to fit in a width.

        The spare ones go first, then one column folds, then the late ones go, and those on the
        right.  The first two, the folded one and the step stay.
        """
        table = self
        for name in filter(self.columns.__contains__, self.spare):
            if table.width <= width:
                return table
            table = table._without(name)
        protected = (*self.columns[:2], self.folding, _NEVER, *self.spare, *self.late)
        rest = [name for name in reversed(self.columns) if name not in protected]
        for name in filter(self.columns.__contains__, (*self.late, *rest)):
            if table.width <= width or table.fold_width(width) >= _LEAST_FOLDED:
                return table
            table = table._without(name)
        return table

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
        from rich.cells import cell_len

        every = zip(self.columns, *self.rows, strict=True)
        return {name: max(map(cell_len, (*name.split(), *cells))) for name, *cells in every}

    def _without(self, name: str) -> ReportTable:
        places = [place for place, column in enumerate(self.columns) if column != name]
        columns, *rows = (tuple(row[p] for p in places) for row in (self.columns, *self.rows))
        return replace(self, columns=columns, rows=tuple(rows))


def table_of(
    key: str, title: str, items: Iterable[_Row], cells: Mapping[str, Callable[[_Row], str]]
) -> ReportTable:
    """A table with a row for each of ``items``, and a column for each way to read one."""
    rows = tuple(tuple(cell(row) for cell in cells.values()) for row in items)
    return ReportTable(key=key, title=title, columns=tuple(cells), rows=rows)


def console(file: IO[str] | None = None) -> Console:
    """Standard output, or a file in its width; where it is no terminal, wide enough for every
    table.

    There, and where ``NO_COLOR`` is set, nothing but text is written.
    """
    from rich.console import Console

    if not sys.stdout.isatty():
        return Console(file=file, width=WIDTH, force_terminal=False, color_system=None)
    return Console(file=file, color_system=None if os.environ.get("NO_COLOR") else "auto")


def show_table(table: ReportTable, out: Console) -> None:
    """Print one table, without what a narrow screen has no room for."""
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    table = table.fit_to_width(out.width)
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


class Cell(str):
    """Text, and the numbers that it says by what follows the column's name, with their unit."""

    numbers: Mapping[str, float | None]

    def __new__(cls, text: str, numbers: Mapping[str, float | None]) -> Cell:
        """Text as it is shown, and the numbers."""
        cell = super().__new__(cls, text)
        cell.numbers = numbers
        return cell


def time_cell(time_s: float) -> Cell:
    """Seconds.

    >>> time_cell(1.8423), time_cell(1.8423).numbers
    ('1.842 s', {' (s)': 1.8423})
    """
    return Cell(format_time(time_s), {" (s)": time_s})


def span_cell(low_s: float, high_s: float) -> Cell:
    """An interval of seconds, which is two numbers."""
    text = f"{format_time(low_s)} to {format_time(high_s)}"
    return Cell(text, {" low (s)": low_s, " high (s)": high_s})


def frac_cell(frac: float | None, *, signed: bool = False) -> Cell:
    """A share of 1, which people read in per cent; nothing for None."""
    return Cell("" if frac is None else format_frac(frac, signed=signed), {" (frac)": frac})


def bytes_cell(nbytes: float, per: str = "") -> Cell:
    """Bytes; with ``per`` of what."""
    return Cell(format_bytes(nbytes) + per, {f" (B{per})": nbytes})


def count_cell(number: float, digits: str = "") -> Cell:
    """A number without a unit of its own; in three digits, or as ``digits`` says."""
    return Cell(format(number, digits) if digits else format_count(number), {"": number})


def whole_cell(number: int) -> Cell:
    """A count, shown whole."""
    return count_cell(number, "d")


def typed_rows(table: ReportTable) -> list[dict[str, Any]]:
    """Rows with numbers in place of their text, None where a cell has none.

    A column of numbers takes their unit into its name: ``step`` becomes ``step (s)``.
    """
    rows: list[dict[str, Any]] = [{} for _ in table.rows]
    for column, cells in zip(table.columns, zip(*table.rows, strict=True), strict=True):
        for name, values in _typed(column, cells):
            for row, value in zip(rows, values, strict=True):
                if name in row:
                    raise ValueError(f"table {table.key} has two columns {name!r}")
                row[name] = value
    return rows


def _typed(column: str, cells: Sequence[str]) -> list[tuple[str, list[Any]]]:
    suffixes = list(dict.fromkeys(end for cell in cells for end in _numbers(cell)))
    if not suffixes:
        return [(column, list(cells))]
    number_columns = [
        (column + end, [_numbers(cell).get(end) for cell in cells]) for end in suffixes
    ]
    has_text = any(cell and not _numbers(cell) for cell in cells)
    return [*number_columns, (column, list(cells))] if has_text else number_columns


def _numbers(cell: str) -> Mapping[str, float | None]:
    return cell.numbers if isinstance(cell, Cell) else {}


Part: TypeAlias = "ReportTable | str"
"""A table, a sentence, or several lines that stand as they are."""


class Command(str):
    """Text that is pasted: it stands in one line however long it is."""


def wrapped(text: str, indent: str = "") -> Iterator[str]:
    """A sentence as lines of at most 80 columns, numbers beside their units."""
    unbroken = re.sub(_UNIT, _NO_BREAK_SPACE, text)
    lines = textwrap.wrap(unbroken, COLUMNS, break_on_hyphens=False, subsequent_indent=indent)
    yield from (line.replace(_NO_BREAK_SPACE, " ") for line in lines or [""])


def prose(part: str) -> str:
    """A sentence within 80 columns; several lines and commands as they are."""
    is_prose = "\n" not in part and not isinstance(part, Command)
    return "\n".join(wrapped(part)) if is_prose else part


def print_parts(parts: Iterable[Part]) -> None:
    """Print an answer; a narrow terminal goes without the spare columns of tables."""
    _show(parts, console(), sys.stdout)


def text_of(parts: Iterable[Part], columns: int = 0) -> str:
    """The same as text, without colours; 0 columns: as wide as standard output."""
    file = io.StringIO()
    out = console(file)
    out.width = columns or out.width
    _show(parts, out, file)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _show(parts: Iterable[Part], out: Console, file: IO[str]) -> None:
    for part in parts:
        if isinstance(part, ReportTable):
            show_table(part, out)
        else:
            print(prose(part), file=file)


def screen_of(parts: Iterable[Part]) -> str:
    """The same within a small screen, with all that has no room there left out at the end."""
    wide = text_of(parts, COLUMNS).splitlines()
    lines = [
        part
        for line in wide
        for part in textwrap.wrap(line, COLUMNS, drop_whitespace=False) or [""]
    ]
    if len(lines) > _LINES:
        lines[_LINES - 1 :] = ["... print() shows all of it"]
    return "\n".join(line.rstrip() for line in lines)


def markdown_of(parts: Iterable[Part]) -> str:
    """The same as Markdown: a heading over each table, several lines as they are."""
    lines: list[str] = []
    for part in parts:
        if isinstance(part, ReportTable):
            lines += [f"## {part.title}", "", *markdown_rows(part.columns, part.rows), ""]
        elif part.strip():
            lines += ["```", part, "```", ""] if "\n" in part else [part, ""]
    return "\n".join(lines)


def markdown_rows(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    every = (columns, ("---",) * len(columns), *rows)
    return ["| " + " | ".join(cells) + " |" for cells in every]


def html_of(parts: Iterable[Part]) -> str:
    """The same as HTML that needs no style sheet; all text is escaped."""
    from html import escape  # its names of signs are slow to import, and no verb needs them

    def row(cells: Iterable[str], tag: str) -> str:
        sides = ("left", *("right" for _ in cells))
        return "".join(
            f'<{tag} style="text-align: {side}; white-space: nowrap">{escape(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=False)
        )

    pieces: list[str] = []
    for part in parts:
        if isinstance(part, ReportTable):
            body = "\n".join(f"<tr>{row(cells, 'td')}</tr>" for cells in part.rows)
            pieces.append(
                f"<table>\n<caption>{escape(part.title)}</caption>\n<thead><tr>"
                f"{row(part.columns, 'th')}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
            )
        elif part.strip():
            tag = "pre" if "\n" in part else "p"
            pieces.append(f"<{tag}>{escape(part)}</{tag}>")
    return "\n".join(pieces)
