"""Text of a benchmark between two marks of a Markdown file."""

from __future__ import annotations

from pathlib import Path


def write_between(path: Path, name: str, text: str) -> None:
    """Replace what stands between ``<!-- name: begin -->`` and its end; append where it is new."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    before, found, rest = old.partition(begin)
    after = rest.partition(end)[2] if found else ""
    if not found and before:
        before = before.rstrip("\n") + "\n\n"
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after or chr(10)}", encoding="utf-8")


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
