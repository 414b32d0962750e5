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
        "Alone: this environment.  With a command behind --, a directory, or both: arguments and "
        "variables of that launch which waste, distort or risk something, with what the model of "
        "the run says of each. Variables stand before the command: -- NCCL_DEBUG=INFO torchrun ..."
    )
    sub.set_defaults(takes_command=True, config=None, also=None, machine=None, like=None)
    sub.set_defaults(cluster=None)
    add = sub.add_argument
    add("directory", type=Path, nargs="?", help="what --calibrate-dir was")
    add("--run-id", help="which run, where the directory holds several")
    add("--device", metavar="NAME", help="as for predict; without a directory by data sheets alone")
    add("--gpus", type=int, metavar="N", help="ranks, where the launcher's words do not say them")
    add("--mtbf-hours", type=float, metavar="H", help="mean time between failures of the job")
    add(
        "--fail-over",
        type=float,
        metavar="FRAC",
        help="exit 1 when what is sure to be gained comes to more than this share",
    )
    add_schema_option(sub, SCHEMA_FILE)


def is_of_a_launch(args: argparse.Namespace) -> bool:
    """Whether ``doctor`` is asked of a launch, and not of what is installed."""
    given = (args.run_id, args.device, args.gpus, args.mtbf_hours, args.fail_over)
    return bool(args.command or args.directory) or any(one is not None for one in given)
