"""Tables of benchmarks in Markdown, printed row by row, or written between two marks of a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def markdown_row(cells: Iterable[object]) -> str:
    """One line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def markdown_head(names: Iterable[str]) -> str:
    """The first two lines of a table."""
    columns = list(names)
    return f"{markdown_row(columns)}\n{markdown_row(['---'] * len(columns))}"


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A whole table."""
    return "\n".join([markdown_head(head), *map(markdown_row, rows)])


def write_between(path: Path, name: str, text: str) -> None:
    """Replace what stands between ``<!-- name: begin -->`` and its end; append where it is new."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    before, found, rest = old.partition(begin)
    after = rest.partition(end)[2] if found else ""
    if not found and before:
        before = before.rstrip("\n") + "\n\n"
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after or chr(10)}", encoding="utf-8")
