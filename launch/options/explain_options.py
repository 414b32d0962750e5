"""What ``forerun explain`` is asked, and the schema of its answer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCHEMA_FILE = Path(__file__).parents[1] / "report" / "explain.schema.json"


def add_explain_options(sub: argparse.ArgumentParser) -> None:
    """Which layouts, on how many ranks, and where to draw them."""
    add = sub.add_argument
    add("directory", type=Path, help="what --calibrate-dir was")
    add("layout", metavar="A", help="the layout to explain")
    add("other", metavar="B", nargs="?", help="another, that it is held against")
    add("--run-id", help="which run, where the directory holds several")
    add("--gpus", type=int, help="number of ranks of both (default: as the run)")
    add("--svg", type=Path, metavar="FILE", help="draw the terms as a waterfall into this file")
    add("--json-schema", action=_PrintSchema, nargs=0, help="the JSON Schema of --json, and exit")


class _PrintSchema(argparse.Action):
    """Prints the schema and ends, as ``--help`` does."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print(SCHEMA_FILE.read_text(encoding="utf-8"), end="")
        parser.exit()
