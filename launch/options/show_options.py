"""Options of ``forerun plan`` for a row as a command that runs."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_show(parser: argparse.ArgumentParser) -> None:
    """``--show N`` and ``--write FILE``."""
    parser.add_argument(
        "--show",
        type=int,
        metavar="N",
        help=("print the whole launch command of row N (0: the running layout)"),
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help=("write the row as an executable script (default row 1)"),
    )


def asks_for_command(args: argparse.Namespace) -> bool:
    """True where a command is wanted in place of the table."""
    return args.show is not None or args.write is not None
