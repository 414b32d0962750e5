"""``forerun normal``: the place of a run among published ones."""

from __future__ import annotations

import argparse

from .arguments import ExitCode, add_schema, declare, print_json, tell
from .asked_run import add_run, opened


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add what ``normal`` takes."""
    add_run(sub)
    sub.set_defaults(also=None, like=None, device=None, cluster=None)
    declare(sub, "--machine NAME  which machine, if several were imported")
    add_schema(sub, "normal")


def run(args: argparse.Namespace) -> int:
    """Print whether the run is as fast as published ones, and what differs."""
    from ..opened import placed, placed_lines  # what reads tables is slow to import

    own = opened(args)
    answer = placed(own)
    tell(*own.machine().problems)
    if args.json:
        print_json(answer.to_json())
    else:
        print("\n".join(placed_lines(answer)))
    return ExitCode.ANSWER
