"""Markdown tables of benchmarks, printed as a whole or row by row."""

from __future__ import annotations

from collections.abc import Iterable


def markdown_row(cells: Iterable[object]) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def markdown_head(names: Iterable[str]) -> str:
    """Return the first two lines of a table."""
    columns = list(names)
    return f"{markdown_row(columns)}\n{markdown_row(['---'] * len(columns))}"


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a whole table."""
    return "\n".join([markdown_head(head), *map(markdown_row, rows)])
