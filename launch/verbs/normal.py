"""``forerun normal``: a run compared with published ones."""

from __future__ import annotations

import argparse

from .arguments import ExitCode, add_schema, declare, print_answer, print_notes
from .run_arguments import add_run, open_run


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of ``normal``."""
    add_run(sub)
    declare(sub, "--machine NAME  which machine, if several were imported")
    add_schema(sub, "normal")


def run(args: argparse.Namespace) -> int:
    """Print whether the run is as fast as published ones, and what differs."""
    from ..opened.placement import place_among_published, placement_lines  # slow to import

    opened_run = open_run(args)
    answer = place_among_published(opened_run)
    print_notes(*opened_run.machine().problems)
    print_answer(args, answer.to_json(), placement_lines(answer))
    return ExitCode.ANSWER
