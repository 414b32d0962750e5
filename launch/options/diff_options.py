"""What ``forerun diff`` is asked, and the schema of its answer."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from ...calib.errors import ConfigError
from ...calib.workload import shown
from .schema_option import add_schema_option

SCHEMA_FILE = Path(__file__).parents[1] / "report" / "diff.schema.json"
_AT, _COMMA = "@", ","


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRun:
    """One side: a run, or some windows of it."""

    directory: Path
    run_id: str | None
    windows: tuple[int, ...]
    """Empty: all."""


def add_diff(verbs: argparse._SubParsersAction) -> None:
    """The verb and its options."""
    sub = verbs.add_parser(
        "diff",
        help="which of two runs is slower, by how much, and where the time went",
        description=(
            "A and B are directories that --calibrate-dir named, or DIR@WINDOW for windows of a "
            "run: DIR@1 or DIR@1,2. Compares measurements; for forecasts use compare. Exit codes: "
            "1 if B is slower by more than --fail-over, 3 if the runs cannot be compared."
        ),
        allow_abbrev=False,
    )
    add = sub.add_argument
    add("first", metavar="A", help="the run to compare with")
    add("second", metavar="B", nargs="?", help="the run to judge")
    add(
        "--run-id",
        action="append",
        metavar="ID",
        help="which run, if a directory holds several; give it twice for A, then B",
    )
    add(
        "--windows",
        nargs=2,
        metavar=("N", "M"),
        help="without B: two windows of A to compare",
    )
    add(
        "--fail-over",
        type=float,
        metavar="FRAC",
        help="exit 1 if B is shown to be slower by more than this share of A's time",
    )
    add("--markdown", action="store_true", help="for a pull request")
    add_schema_option(sub, SCHEMA_FILE)


def asked_runs(args: argparse.Namespace) -> tuple[AskedRun, AskedRun]:
    """A and B; ``ConfigError`` with value, rule and remedy where they are not told."""
    over, names = args.fail_over, args.run_id or []
    if over is not None and not 0 <= over < math.inf:
        raise ConfigError(f"--fail-over {over} is not a share; give 0 or more, such as 0.05")
    if len(names) > 2:
        raise ConfigError(f"--run-id is given {len(names)} times; give it once for each of A and B")
    if args.windows and args.second is not None:
        raise ConfigError("--windows compares windows of one run; give no B, or B as DIR@WINDOW")
    if args.windows:
        first, second = (f"{args.first}{_AT}{window}" for window in args.windows)
        names = names * 2 if len(names) == 1 else names
    elif args.second is None and len(names) < 2:
        raise ConfigError(
            "one run has nothing to be compared with; give B, --windows N M, or --run-id twice"
        )
    else:
        first, second = args.first, args.second or args.first
    if len(names) == 1:
        raise ConfigError(f"--run-id {names[0]} may mean A or B; give it twice, for A, then B")
    runs = names or [None, None]
    return _asked(first, runs[0]), _asked(second, runs[1])


def _asked(text: str, run_id: str | None) -> AskedRun:
    """A directory, with windows behind ``@`` where no such directory is there."""
    directory, at, windows = text.rpartition(_AT)
    if not at or Path(text).is_dir():
        return AskedRun(directory=Path(text), run_id=run_id, windows=())
    parts = windows.split(_COMMA)
    if not all(part.isdecimal() and len(part) < 8 for part in parts):
        raise ConfigError(
            f"{shown(windows)} is not a window; write DIR@1, or DIR@1,2 for several together"
        )
    return AskedRun(
        directory=Path(directory), run_id=run_id, windows=tuple(int(part) for part in parts)
    )
