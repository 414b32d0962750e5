"""``--json-schema``: what ``--json`` of a verb prints, or a file of a run holds, as JSON Schema."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .file_schemas import FILE_NAMES, file_schema


def add_schema_option(sub: argparse.ArgumentParser, schema: Path) -> None:
    """The option of a verb whose answers the file describes."""
    sub.add_argument(
        "--json-schema",
        action=_Print,
        nargs=0,
        const=schema,
        help="print the JSON Schema of --json and exit",
    )


def add_file_schema_option(sub: argparse.ArgumentParser) -> None:
    """The same for each file that a run leaves, by its name."""
    sub.add_argument(
        "--json-schema",
        action=_PrintFile,
        choices=sorted(FILE_NAMES),
        metavar="FILE",
        help=f"print the JSON Schema of a file of a run and exit: {', '.join(FILE_NAMES)}",
    )


class _PrintFile(argparse.Action):
    """Prints the schema of a file and ends."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print(json.dumps(file_schema(str(values)), indent=2))
        parser.exit()


class _Print(argparse.Action):
    """Prints a file and ends, as ``--help`` does."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print(Path(self.const).read_text(encoding="utf-8"), end="")
        parser.exit()
