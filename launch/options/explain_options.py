"""What ``forerun explain`` is asked, and the schema of its answer."""

from __future__ import annotations

import argparse
from pathlib import Path

from .schema_option import add_schema_option

SCHEMA_FILE = Path(__file__).parents[1] / "report" / "explain.schema.json"


def add_explain_options(sub: argparse.ArgumentParser) -> None:
    """Which layouts, on how many ranks, and where to draw them."""
    add = sub.add_argument
    add("directory", type=Path, metavar="DIR", help="the directory that --calibrate-dir named")
    add("layout", metavar="A", help="the layout to explain")
    add("other", metavar="B", nargs="?", help="another layout to compare it with")
    add("--run-id", help="which run, if the directory holds several")
    add("--gpus", type=int, help="number of ranks of both layouts (default: as in the run)")
    add(
        "--svg",
        type=Path,
        metavar="FILE",
        help=("draw the terms as a waterfall chart into this SVG file"),
    )
    add_timeline(sub)
    add_schema_option(sub, SCHEMA_FILE)


def add_timeline(sub: argparse.ArgumentParser) -> None:
    """Where to write the steps as a trace."""
    sub.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write the steps as a trace into this file, which ui.perfetto.dev opens",
    )
