"""Options of the verbs that read what a run has said of itself, and fit nothing."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_compare(verbs: argparse._SubParsersAction) -> None:
    """The options of ``forerun compare``."""
    add = verbs.add_parser(
        "compare",
        help="every forecast that was made, against what happened",
        description="For each run of these directories that has come to its end: error of the "
        "forecast finish over time, how often its intervals and those of single steps held, and "
        "from when on it was right.",
        allow_abbrev=False,
    ).add_argument
    add("directories", type=Path, nargs="+", metavar="DIR")
    add(
        "--fail-over",
        type=float,
        metavar="FRAC",
        help="exit 1 when the first forecast of a run was off by more than this share of it",
    )
