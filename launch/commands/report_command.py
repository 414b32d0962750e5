"""``forerun report``: what a calibrated run says of itself; no torch needed."""

from __future__ import annotations

import argparse

from ...calib.answers.answer import Answer
from ..opened.run import load
from ..report.measured_tables import measured_tables
from ..report.run_tables import show, show_parts
from ..report.table import console
from .outcome import ExitCode, print_json


def report(args: argparse.Namespace) -> int:
    """Print what the run says of itself; 1 where the advice is to stop."""
    found = load(args.directory, run_id=args.run_id).report()
    if args.json:
        print_json(found.to_json())
    elif isinstance(found.answer, Answer):
        show(found.answer, console())
    else:
        answer = found.answer
        show_parts(answer.transcript, measured_tables(answer), found.problems, console())
    return ExitCode.THRESHOLD if found.is_stop else ExitCode.ANSWER
