"""What ``forerun doctor`` is asked of a launch."""

from __future__ import annotations

import argparse
from pathlib import Path

from .schema_option import add_schema_option

SCHEMA_FILE = Path(__file__).parents[1] / "report" / "lint.schema.json"
"""Of what ``doctor`` prints of a launch for programs: JSON Schema, draft 2020-12."""


def add_lint_options(sub: argparse.ArgumentParser) -> None:
    """The options that ``doctor`` has beside none at all."""
    sub.description = (
        "Without arguments: this environment.  With a command after --, a directory, or both: "
        "arguments and variables of that launch that waste time, distort measurements or risk the "
        "run, each with its gain by the model of the run. Write variables before the command: -- "
        "NCCL_DEBUG=INFO torchrun ..."
    )
    sub.set_defaults(takes_command=True, config=None, also=None, machine=None, like=None)
    sub.set_defaults(cluster=None)
    add = sub.add_argument
    add("directory", type=Path, nargs="?", help="the directory that --calibrate-dir named")
    add("--run-id", help="which run, if the directory holds several")
    add(
        "--device",
        metavar="NAME",
        help=("as for predict; without a directory, by data sheets alone"),
    )
    add(
        "--gpus",
        type=int,
        metavar="N",
        help=("number of ranks, if the launch command does not say it"),
    )
    add(
        "--mtbf-hours",
        type=float,
        metavar="H",
        help=("mean time between failures of the job, in hours"),
    )
    add(
        "--fail-over",
        type=float,
        metavar="FRAC",
        help="exit 1 if the sure gains add up to more than this share of the step",
    )
    add_schema_option(sub, SCHEMA_FILE)


def is_of_a_launch(args: argparse.Namespace) -> bool:
    """Whether ``doctor`` is asked of a launch, and not of what is installed."""
    given = (args.run_id, args.device, args.gpus, args.mtbf_hours, args.fail_over)
    return bool(args.command or args.directory) or any(one is not None for one in given)
