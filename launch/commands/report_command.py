"""``forerun report``: what a calibrated run says of itself; no torch needed."""

from __future__ import annotations

import argparse

from ..opened.drawn import print_parts
from ..opened.loading import load
from .outcome import ExitCode, print_json


def report(args: argparse.Namespace) -> int:
    """Print what the run says of itself; 1 where the advice is to stop."""
    found = load(args.directory, run_id=args.run_id).report()
    if args.json:
        print_json(found.to_json())
    else:
        print_parts(found.parts() if args.full else found.brief())
    return ExitCode.THRESHOLD if found.is_stop else ExitCode.ANSWER
