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
            help="where a live or finished run is now",
            description=(
                "For each launch of the directory: live, ended, stopped (before its last step) or "
                "lost (ended without notice), its step, its end, the decision. Exits with 1 if the "
                "advice is to stop."
            ),
            allow_abbrev=False,
        )
    )


def add_watch(verbs: argparse._SubParsersAction) -> None:
    """The options of ``forerun watch``."""
    _add_live(
        verbs.add_parser(
            "watch",
            help="status as it changes, until the run has ended",
            description=(
                "Redraws the output of status while a run is live; if standard output is not a "
                "terminal, prints a line for each change; with --json, a JSON value for each. Ends "
                "with the run, or with Ctrl-C."
            ),
            allow_abbrev=False,
        )
    )


def _add_live(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "directory", type=Path, metavar="DIR", help=("the directory that --calibrate-dir named")
    )
    sub.add_argument("--run-id", metavar="NAME", help="only this run or launch")
    add_schema_option(sub, SCHEMA_FILE)


def add_compare(verbs: argparse._SubParsersAction) -> None:
    """The options of ``forerun compare``."""
    add = verbs.add_parser(
        "compare",
        help="how right the forecasts were",
        description=(
            "For each finished run of these directories: the error of the forecast finish over "
            "time, how often its intervals and those of single steps held, and from which step on "
            "the forecast was right."
        ),
        allow_abbrev=False,
    ).add_argument
    add(
        "directories",
        type=Path,
        nargs="+",
        metavar="DIR",
        help=("the directory that --calibrate-dir named"),
    )
    add(
        "--fail-over",
        type=float,
        metavar="FRAC",
        help="exit 1 if the first forecast of a run was off by more than this share of the run",
    )
