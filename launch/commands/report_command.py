"""``forerun report``: what a calibrated run says of itself; no torch needed."""

from __future__ import annotations

import argparse

from ...calib.answers.analysis import Answer
from ..opened.run import load
from ..report.run_tables import show
from ..report.table import console
from .outcome import ExitCode, print_json, tell


def report(args: argparse.Namespace) -> int:
    """Print what the run says of itself; 1 where the advice is to stop."""
    found = load(args.directory, run_id=args.run_id).report()
    if args.json:
        print_json(found.to_json())
    elif isinstance(found.answer, Answer):
        show(found.answer, console())
    else:
        tell(*found.problems)
        print("\n".join(found.transcript))
    return ExitCode.THRESHOLD if found.is_stop else ExitCode.ANSWER
