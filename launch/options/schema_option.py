"""``--json-schema``: what ``--json`` of a verb prints, as JSON Schema."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add_schema_option(sub: argparse.ArgumentParser, schema: Path) -> None:
    """The option of a verb whose answers the file describes."""
    sub.add_argument(
        "--json-schema",
        action=_Print,
        nargs=0,
        const=schema,
        help="the JSON Schema of --json, and exit",
    )


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
