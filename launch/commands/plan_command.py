"""``forerun plan``: the best layouts on numbers of GPUs, of the run's kind or of others."""

from __future__ import annotations

import argparse

from ..opened.drawn import print_parts
from ..options.plan_options import plan_words
from ..options.show_options import asks_for_command
from .answer_commands import opened, other_run
from .outcome import ExitCode, print_json, tell


def plan(args: argparse.Namespace) -> int:
    """Print the layouts that were asked for, best first."""
    run = opened(args)
    found = run.plan(**plan_words(args), **other_run(args), num_rows=args.show or 0)
    tell(*found.notes)
    if asks_for_command(args):
        from .shown_command import show  # launch lines are built for this alone

        return show(args, found)
    if args.json:
        print_json(found.to_json())
    else:
        print_parts(found.parts())
    return ExitCode.ANSWER
