"""JSON Schemas of the files that a run leaves, each by the name of its file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .plan_options import SCHEMA_FILE as ANSWERS

FILES = ANSWERS.with_name("files.schema.json")
"""Of all of them; what they share with answers of verbs stands with those."""
FILE_NAMES = (
    *("answer", "decision", "forecast", "score", "drift", "request", "stop", "stop-request"),
    *("owner", "launch", "command", "forecasts", "status"),
)


def file_schema(name: str) -> dict[str, Any]:
    """The schema of a file, draft 2020-12, with all that it refers to and nothing else.

    ``name`` is one of ``FILE_NAMES``, as ``decision`` for ``decision.json``; of ``forecasts.jsonl``
    it describes a line.  The number at the end of ``$id`` is the file's own ``schema``.
    """
    whole = _read(FILES)
    known = _read(ANSWERS)["$defs"] | whole["$defs"]
    kept: dict[str, Any] = {}
    left = [name]
    while left:
        if (one := left.pop()) not in kept:
            kept[one] = known[one]
            left += _references(known[one])
    return {
        "$schema": whole["$schema"],
        "$id": f"urn:forerun:{name}:{known[name]['properties']['schema']['const']}",
        "title": known[name]["description"],
        "description": whole["description"].rpartition(" What is not")[0],
        "$ref": f"#/$defs/{name}",
        "$defs": {one: kept[one] for one in sorted(kept)},
    }


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _references(value: Any) -> Iterator[str]:
    """Names of the definitions that a schema refers to."""
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference.rpartition("/")[2]
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from _references(one)
