"""JSON files of a run, each with the schema that is published for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from json_schema import check

from forerun.launch.verbs.arguments import FILE_NAMES, file_schema


def written_files(directory: Path) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every JSON file and of every line of ``forecasts.jsonl``.

    Without records, which have a format of their own, cached reports, and what is W&B's.
    """
    for path in sorted(directory.rglob("*.json")):
        is_cache = path.name.startswith("report-")
        if not is_cache and "wandb" not in path.relative_to(directory).parts:
            yield path.stem, json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield path.stem, json.loads(line)


def check_written_files(directory: Path) -> set[str]:
    """Return the names of the files; raise ``Mismatch`` if one violates its schema or has none."""
    seen: set[str] = set()
    for name, value in written_files(directory):
        assert name in FILE_NAMES, f"{name} has no schema"
        check(value, file_schema(name))
        seen.add(name)
    return seen
