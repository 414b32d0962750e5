"""``forerun explain``: breakdown of a layout's step, or of its difference from another's."""

from __future__ import annotations

import argparse

from .arguments import DIRECTORY, RUN_ID, TIMELINE, ExitCode, add_schema, declare, print_notes
from .run_arguments import add_evidence, open_run, other_run, show_answer

_DESCRIPTION = (
    "A layout is named as a plan prints it (TP4 PP2 DP2 mbs2), in short names over the running "
    "layout (tp4 pp2), by its row in the plan (3), or as running."
)
_ARGUMENTS = f"""
{DIRECTORY}layout A  the layout to explain
other B  another layout to compare it with
{RUN_ID}--gpus GPUS  number of ranks of both layouts (default: as in the run)
--svg FILE  draw the terms as a waterfall chart into this SVG file
{TIMELINE}"""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of ``explain``."""
    sub.description = _DESCRIPTION
    declare(sub, _ARGUMENTS, other={"nargs": "?"}, gpus={"type": int})
    add_schema(sub, "explain")
    add_evidence(sub)


def run(args: argparse.Namespace) -> int:
    """Print the terms of a step, or of the difference between two."""
    answer = open_run(args).explain(args.layout, args.other, gpus=args.gpus, **other_run(args))
    show_answer(args, answer)
    if args.svg is not None:
        answer.write_svg(args.svg)
        print_notes(f"waterfall written to {args.svg}")
    return ExitCode.ANSWER
