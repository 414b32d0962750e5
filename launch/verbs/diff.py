"""``forerun diff``: which of two runs is slower, by how much, and in which terms."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ...calib.errors import ConfigError
from ...calib.workload.argument_values import shown
from .arguments import ExitCode, add_schema, declare, print_answer, print_notes

if TYPE_CHECKING:
    from ...calib.samples.table import SampleTable

_DESCRIPTION = (
    "A and B are directories that --calibrate-dir named, or DIR@WINDOW for windows of a run: DIR@1 "
    "or DIR@1,2. Compares measurements. Exit codes: 1 if B is slower by "
    "more than --fail-over, 3 if the runs cannot be compared."
)
_ARGUMENTS = """
first A           the run to compare with
second B          the run to judge
--run-id ID       which run, if a directory holds several; give it twice for A, then B
--windows N M     without B: two windows of A to compare
--fail-over FRAC  exit 1 if B is shown to be slower by more than this share of A's time
--markdown        for a pull request
"""
_AT = "@"


RunSelection: TypeAlias = "tuple[Path, str | None, tuple[int, ...]]"
"""One side: a directory, a run in it, and windows of the run; empty: all windows."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of ``diff``."""
    sub.description = _DESCRIPTION
    repeated = {"action": "append"}
    declare(sub, _ARGUMENTS, second={"nargs": "?"}, windows={"nargs": 2}, run_id=repeated)
    add_schema(sub, "diff")


def run(args: argparse.Namespace) -> int:
    """Print B compared with A; return 1 if B is slower by more than ``--fail-over``, 3 if the runs
    cannot be compared."""
    from ...calib.differences.levels import Verdict
    from ...calib.differences.two_runs import difference
    from ..views.explain_text import difference_lines, difference_markdown

    first, second = run_selections(args)
    answer = difference(_table(*first), _table(*second))
    lines = difference_markdown(answer) if args.markdown else difference_lines(answer)
    print_answer(args, answer.to_json(), lines)
    if answer.verdict is Verdict.NOT_COMPARABLE:
        return ExitCode.NO_DATA
    is_over = args.fail_over is not None and answer.is_slower_by(args.fail_over)
    return ExitCode.THRESHOLD if is_over else ExitCode.ANSWER


def run_selections(args: argparse.Namespace) -> tuple[RunSelection, RunSelection]:
    """Return A and B; ``ConfigError`` with value, rule and remedy if they are not determined."""
    if (frac := args.fail_over) is not None and not 0 <= frac < float("inf"):
        raise ConfigError(f"--fail-over {frac} is not a share; give 0 or more, such as 0.05")
    first, second, names = args.first, args.second or args.first, args.run_id or []
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
    if len(names) == 1:
        raise ConfigError(f"--run-id {names[0]} may mean A or B; give it twice, for A, then B")
    runs = names or [None, None]
    return _run_selection(first, runs[0]), _run_selection(second, runs[1])


def _run_selection(text: str, run_id: str | None) -> RunSelection:
    """Parse a directory with optional ``@`` windows; an existing path is taken literally."""
    directory, at, windows = text.rpartition(_AT)
    if not at or Path(text).is_dir():
        return Path(text), run_id, ()
    parts = windows.split(",")
    if not all(part.isdecimal() and len(part) < 8 for part in parts):
        raise ConfigError(
            f"{shown(windows)} is not a window; write DIR@1, or DIR@1,2 for several together"
        )
    return Path(directory), run_id, tuple(map(int, parts))


def _table(directory: Path, run_id: str | None, windows: tuple[int, ...]) -> SampleTable:
    """Return the selected windows of a run; damaged records are reported on standard error."""
    from ...calib.samples.table import only_windows, windows_of
    from ..known.runs import read

    loaded = read(directory, run_id)
    print_notes(*loaded.problems)
    if not windows:
        return loaded.table
    known = windows_of(loaded.table)
    if lacking := [window for window in windows if window not in known]:
        raise ConfigError(
            f"window {lacking[0]} is not in run {loaded.table.run_id}; it has "
            f"{', '.join(map(str, known))}"
        )
    return only_windows(loaded.table, windows)
