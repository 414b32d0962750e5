"""Report tables, and rendering of answers as text and HTML and on a terminal."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, TypeAlias, TypeVar

from ...calib.shell import printable
from ...calib.units import format_bytes, format_count, format_frac, format_time
from ...hooks.process.interpreter import install_command, is_installed

if not is_installed("rich"):  # reported before any error about a directory
    raise ImportError(f"tables need rich; {install_command()}")

if TYPE_CHECKING:  # rich is slow to import, and programs read JSON
    from rich.console import Console

_Row = TypeVar("_Row")
COLUMNS = 80
"""Width of a common terminal, to which sentences are wrapped everywhere."""
_LINES = 24
"""Lines of a small screen."""
_UNIT = r"(?<=\d) (?=(?:s|ms|us|min|h)\b|%)"
"""Space between a number and its unit, which must not break."""
_NO_BREAK_SPACE = "\u00a0"
"""Non-breaking space."""
WIDTH = 200
"""Width of output into a file, enough for the widest table of a report."""
_GAP = 2
"""Characters between columns."""
_LEAST_FOLDED = 12
"""Minimum width of a folded column, in characters; the words of labels are shorter."""
_NEVER = "step"
"""Column that is never dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """Titled table of text; ``key`` names it on W&B, which requires unique column names."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    spare: tuple[str, ...] = ()
    """Columns to drop on a narrow screen, in order of dropping."""
    late: tuple[str, ...] = ()
    """Columns to drop once the folded column is too narrow."""
    folded: str = ""
    """Column whose cells may take several lines; empty for the first."""

    def __post_init__(self) -> None:
        if not all(cell.isprintable() for row in self.rows for cell in row):
            rows = (tuple(c if c.isprintable() else printable(c) for c in row) for row in self.rows)
            object.__setattr__(self, "rows", tuple(rows))

    def with_spare_columns(
        self, *names: str, late: tuple[str, ...] = (), folded: str = ""
    ) -> ReportTable:
        """Return the table with the columns to drop on a narrow screen, and the one to fold."""
        return replace(self, spare=names, late=late, folded=folded)

    def fit_to_width(self, width: int) -> ReportTable:
        """Return the table without the columns that must be dropped to fit a width.

        The spare columns are dropped first, then one column folds, then the late ones and those on
        the right are dropped.  The first two, the folded one and the step remain.
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
        """Column that may fold."""
        return self.folded if self.folded in self.columns else self.columns[0]

    @property
    def width(self) -> int:
        """Characters of the widest line, with headers wrapped."""
        return sum(self.widths().values()) + _GAP * (len(self.columns) - 1)

    def fold_width(self, width: int) -> int:
        """Return the characters left for the folded column by the others."""
        return width - self.width + self.widths()[self.folding]

    def widths(self) -> dict[str, int]:
        """Return the characters of each column; a header counts by its longest word."""
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
    """Return a table with a row for each of ``items`` and a column for each of ``cells``."""
    rows = tuple(tuple(cell(row) for cell in cells.values()) for row in items)
    return ReportTable(key=key, title=title, columns=tuple(cells), rows=rows)


def console(file: IO[str] | None = None) -> Console:
    """Return a console on standard output, or on a file with its width; without a terminal, as wide
    as COLUMNS says, else as every table needs.

    Without a terminal, or if ``NO_COLOR`` is set, only plain text is written.
    """
    from rich.console import Console

    as_text: dict[str, Any] = {"file": file, "markup": False, "emoji": False}
    if not sys.stdout.isatty():
        width = shutil.get_terminal_size((WIDTH, _LINES)).columns  # of COLUMNS, if set
        return Console(width=width, force_terminal=False, color_system=None, **as_text)
    return Console(color_system=None if os.environ.get("NO_COLOR") else "auto", **as_text)


def show_table(table: ReportTable, out: Console) -> None:
    """Print a table, without the columns that do not fit a narrow screen."""
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
    # As rich's table title it would wrap at the table's width.
    out.print(Text(table.title, style="table.title"))
    out.print(drawn)


def _tall(header: str, width: int) -> str:
    """Return a header wrapped to a width.

    >>> _tall("against running", 8)
    'against\\nrunning'
    """
    return "\n".join(textwrap.wrap(header, width, break_long_words=False))


class Cell(str):
    """Cell text with its numbers, by the suffix (with unit) to add to the column's name."""

    numbers: Mapping[str, float | None]

    def __new__(cls, text: str, numbers: Mapping[str, float | None]) -> Cell:
        """Return a cell of display text and numbers."""
        cell = super().__new__(cls, text)
        cell.numbers = numbers
        return cell


def time_cell(time_s: float) -> Cell:
    """Return a cell of seconds.

    >>> time_cell(1.8423), time_cell(1.8423).numbers
    ('1.842 s', {' (s)': 1.8423})
    """
    return Cell(format_time(time_s), {" (s)": time_s})


def span_cell(low_s: float, high_s: float) -> Cell:
    """Return a cell of an interval of seconds, which has two numbers."""
    text = f"{format_time(low_s)} to {format_time(high_s)}"
    return Cell(text, {" low (s)": low_s, " high (s)": high_s})


def frac_cell(frac: float | None, *, signed: bool = False) -> Cell:
    """Return a cell of a fraction, shown in per cent; empty for None."""
    return Cell("" if frac is None else format_frac(frac, signed=signed), {" (frac)": frac})


def bytes_cell(nbytes: float, per: str = "") -> Cell:
    """Return a cell of bytes, per ``per`` if given."""
    return Cell(format_bytes(nbytes) + per, {f" (B{per})": nbytes})


def count_cell(number: float, digits: str = "") -> Cell:
    """Return a cell of a unitless number, with three digits or in the format ``digits``."""
    return Cell(format(number, digits) if digits else format_count(number), {"": number})


def whole_cell(number: int) -> Cell:
    """Return a cell of a count, with all digits."""
    return count_cell(number, "d")


def typed_rows(table: ReportTable) -> list[dict[str, Any]]:
    """Return rows with numbers instead of text, None if a cell has none.

    The name of a column of numbers includes the unit: ``step`` becomes ``step (s)``.
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
"""Table, sentence, or preformatted lines."""


class Command(str):
    """Text to paste, which is never wrapped."""


def wrapped(text: str, indent: str = "") -> Iterator[str]:
    """Yield a sentence as lines of at most 80 columns, without breaks before units."""
    unbroken = re.sub(_UNIT, _NO_BREAK_SPACE, text)
    lines = textwrap.wrap(unbroken, COLUMNS, break_on_hyphens=False, subsequent_indent=indent)
    yield from (line.replace(_NO_BREAK_SPACE, " ") for line in lines or [""])


def prose(part: str) -> str:
    """Return a sentence wrapped to 80 columns; several lines and commands unchanged."""
    is_prose = "\n" not in part and not isinstance(part, Command)
    return "\n".join(wrapped(part)) if is_prose else part


def print_parts(parts: Iterable[Part]) -> None:
    """Print an answer; on a narrow terminal, tables lose their spare columns."""
    _show(parts, console(), sys.stdout)


def text_of(parts: Iterable[Part], columns: int = 0) -> str:
    """Return an answer as text without colours; 0 columns: as wide as standard output."""
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
    """Return an answer as text cut to a small screen."""
    wide = text_of(parts, COLUMNS).splitlines()
    lines = [
        part
        for line in wide
        for part in textwrap.wrap(line, COLUMNS, drop_whitespace=False) or [""]
    ]
    if len(lines) > _LINES:
        lines[_LINES - 1 :] = ["... print() shows all of it"]
    return "\n".join(line.rstrip() for line in lines)


def markdown_rows(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    every = (columns, ("---",) * len(columns), *rows)
    return ["| " + " | ".join(cells) + " |" for cells in every]


def html_of(parts: Iterable[Part]) -> str:
    """Return an answer as HTML that needs no style sheet; all text is escaped."""
    from html import escape  # slow to import, and no verb needs it

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
