"""A cell of a table: text for people that keeps the numbers behind it, for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...calib.units import format_bytes, format_count, format_frac, format_time
from .table import ReportTable

if TYPE_CHECKING:
    from ...calib.advice import Candidate


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
    text = "" if frac is None else format_frac(frac, signed=signed)
    return Cell(text, {" (frac)": frac})


def against_cell(one: Candidate) -> Cell:
    """How much more or less a layout takes than the running one; empty where that does other
    work."""
    return Cell(one.against_text, {" (frac)": one.time_frac if one.is_comparable else None})


def bytes_cell(nbytes: float, per: str = "") -> Cell:
    """Bytes; with ``per`` of what."""
    return Cell(format_bytes(nbytes) + per, {f" (B{per})": nbytes})


def count_cell(number: float, digits: str = "") -> Cell:
    """A number without a unit of its own; in three digits, or as ``digits`` says."""
    return Cell(format(number, digits) if digits else format_count(number), {"": number})


def probability_cell(probability: float) -> Cell:
    """A probability, whose column says so."""
    return Cell(f"{probability:.2f}", {"": probability})


def whole_cell(number: int) -> Cell:
    """A count, shown whole."""
    return Cell(str(number), {"": number})


def typed_rows(table: ReportTable) -> list[dict[str, Any]]:
    """Rows with numbers in place of their text, None where a cell has none.

    A column of numbers takes their unit into its name: ``step`` becomes ``step (s)``.
    """
    found: list[dict[str, Any]] = [{} for _ in table.rows]
    for column, cells in zip(table.columns, zip(*table.rows, strict=True), strict=True):
        for name, values in _typed(column, cells):
            for row, value in zip(found, values, strict=True):
                if name in row:
                    raise ValueError(f"table {table.key} has two columns {name!r}")
                row[name] = value
    return found


def _typed(column: str, cells: Sequence[str]) -> list[tuple[str, list[Any]]]:
    suffixes = list(dict.fromkeys(end for cell in cells for end in _numbers(cell)))
    if not suffixes:
        return [(column, list(cells))]
    found = [(column + end, [_numbers(cell).get(end) for cell in cells]) for end in suffixes]
    has_text = any(cell and not _numbers(cell) for cell in cells)
    return [*found, (column, list(cells))] if has_text else found


def _numbers(cell: str) -> Mapping[str, float | None]:
    return cell.numbers if isinstance(cell, Cell) else {}
