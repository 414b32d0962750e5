"""``forerun status`` and ``forerun watch``: where the runs of a directory are now."""

from __future__ import annotations

import argparse

from .arguments import DIRECTORY, add_schema, declare

_STATUS = (
    "For each launch of the directory: live, ended, stopped (before its last step) or lost (ended "
    "without notice), its step, its end, the decision. Exits with 1 if the advice is to stop."
)
_WATCH = (
    "Redraws the output of status while a run is live; if standard output is not a terminal, "
    "prints a line for each change; with --json, a JSON value for each. Ends with the run, or with "
    "Ctrl-C."
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add what both verbs take."""
    sub.description = _WATCH if sub.prog.endswith("watch") else _STATUS
    declare(sub, DIRECTORY + "--run-id NAME  only this run or launch")
    add_schema(sub, "status")


def run(args: argparse.Namespace) -> int:
    """Print what each launch says, once or until no run is live; 1 where one is to stop."""
    if args.verb == "watch":
        from ..live.run_status import watch as answer
    else:
        from ..live.run_status import status as answer
    return answer(args)
