"""``forerun diff``: which of two runs is slower, by how much, and where the time went."""

from __future__ import annotations

import argparse

from ...calib.differences import Verdict, difference
from ...calib.errors import ConfigError
from ...calib.samples import SampleTable, only_windows, windows_of
from ..known.runs import read
from ..options.diff_options import AskedRun, asked_runs
from ..report.diff_text import difference_lines, difference_markdown
from .outcome import ExitCode, print_json, tell


def diff(args: argparse.Namespace) -> int:
    """Print B held against A; 1 where B is slower by more than ``--fail-over``, 3 where the runs
    cannot be compared."""
    first, second = asked_runs(args)
    found = difference(_table(first), _table(second))
    if args.json:
        print_json(found.to_json())
    else:
        lines = difference_markdown(found) if args.markdown else difference_lines(found)
        for line in lines:
            print(line)
    if found.verdict is Verdict.NOT_COMPARABLE:
        return ExitCode.NO_DATA
    is_over = args.fail_over is not None and found.is_slower_by(args.fail_over)
    return ExitCode.THRESHOLD if is_over else ExitCode.ANSWER


def _table(asked: AskedRun) -> SampleTable:
    """What is asked of a run; damaged records are told on standard error."""
    loaded = read(asked.directory, asked.run_id)
    tell(*loaded.problems)
    if not asked.windows:
        return loaded.table
    known = windows_of(loaded.table)
    for window in asked.windows:
        if window not in known:
            raise ConfigError(
                f"window {window} is not in run {loaded.table.run_id}; it has "
                f"{', '.join(map(str, known))}"
            )
    return only_windows(loaded.table, asked.windows)
