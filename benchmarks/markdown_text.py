"""Markdown tables of benchmarks, printed row by row, or written between two markers of a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


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


def write_between(path: Path, name: str, text: str) -> None:
    """Replace the text between ``<!-- name: begin -->`` and its end marker; append if absent."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    before, marker, rest = old.partition(begin)
    after = rest.partition(end)[2] if marker else ""
    if not marker and before:
        before = before.rstrip("\n") + "\n\n"
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after or chr(10)}", encoding="utf-8")
