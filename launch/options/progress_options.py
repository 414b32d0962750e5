"""Options of the verbs that read what a run has said of itself, and fit nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from .schema_option import add_schema_option

SCHEMA_FILE = Path(__file__).parents[1] / "report" / "status.schema.json"


def add_status(verbs: argparse._SubParsersAction) -> None:
    """The options of ``forerun status``."""
    _add_live(
        verbs.add_parser(
            "status",
            help="what a live or finished run says now",
            description="Of each launch of the directory: live, ended, stopped (before its last "
            "step) or lost (gone without a word), its step, its end, the decision. Exits with 1 "
            "where the advice is to stop.",
            allow_abbrev=False,
        )
    )


def add_watch(verbs: argparse._SubParsersAction) -> None:
    """The options of ``forerun watch``."""
    _add_live(
        verbs.add_parser(
            "watch",
            help="the same as status, as it changes, until the run has ended",
            description="Draws what status prints anew while a run is live; where standard output "
            "is no terminal, a line for each change; with --json a JSON value for each. Ends with "
            "the run, or with Ctrl-C.",
            allow_abbrev=False,
        )
    )


def _add_live(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("directory", type=Path, metavar="DIR", help="what --calibrate-dir was")
    sub.add_argument("--run-id", metavar="NAME", help="this run or launch alone")
    add_schema_option(sub, SCHEMA_FILE)


def add_compare(verbs: argparse._SubParsersAction) -> None:
    """The options of ``forerun compare``."""
    add = verbs.add_parser(
        "compare",
        help="scores every forecast that was made against what happened",
        description="For each run of these directories that has come to its end: error of the "
        "forecast finish over time, how often its intervals and those of single steps held, and "
        "from when on it was right.",
        allow_abbrev=False,
    ).add_argument
    add("directories", type=Path, nargs="+", metavar="DIR", help="what --calibrate-dir was")
    add(
        "--fail-over",
        type=float,
        metavar="FRAC",
        help="exit 1 when the first forecast of a run was off by more than this share of it",
    )
