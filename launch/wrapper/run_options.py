"""The options of ``forerun run``: its command stands behind ``--``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ...calib.records import LONGEST_S

STOP_EXIT_CODE = 93
"""Stopped on advice: do not requeue."""
SCRIPT = "resubmit.sh"
_TIMES = {
    "--grace": (120.0, "time from SIGTERM to SIGKILL (default 2m)"),
    "--stop-patience": (300.0, "time from a request to save and stop to SIGTERM (default 5m)"),
    "--margin": (300.0, "time to spare before the limit (default 5m)"),
    "--time-limit": (None, "time limit from now on (default: what Slurm grants)"),
    "--job-time": (None, "wall time of one job, to count the chained jobs that are left"),
}


def add_run(verbs: argparse._SubParsersAction) -> None:
    """The options of ``forerun run``."""
    run_parser = verbs.add_parser(
        "run",
        help="start a training command and own the exit code that the scheduler sees",
        usage="forerun run [options] -- COMMAND ...",
        description=(
            "Starts the command after --, passes SIGTERM, SIGINT and SIGHUP on once, takes SIGUSR1 "
            "and SIGUSR2 as a request to save and stop, and leaves no process behind. Exits with "
            "the command's code, 128+n if signal n ended it, 93 if it stopped on advice."
        ),
        allow_abbrev=False,
    )
    run_parser.set_defaults(takes_command=True)
    add = run_parser.add_argument
    text = "the --calibrate-dir of a command inside a script"
    add("--directory", type=Path, metavar="DIR", help=text)
    text = f"exit code of a stop on advice (default {STOP_EXIT_CODE})"
    add("--stop-exit-code", type=_code, default=STOP_EXIT_CODE, metavar="N", help=text)
    for name, (default_s, text) in _TIMES.items():
        add(name, type=_time, default=default_s, metavar="TIME", help=text)
    text = "save and stop before the limit, instead of only warning"
    add("--save-before-limit", action="store_true", help=text)
    text = (
        "where to write the script with the advised layout, even without a stop (default, only on "
        f"an advised stop: DIR/{SCRIPT}); a file that Forerun did not write is never replaced"
    )
    add("--resubmit-script", type=Path, metavar="FILE", help=text)
    text = "only print what would run and what the scheduler grants"
    add("--dry-run", action="store_true", help=text)
    add("--json", action="store_true", help="one JSON value as the last line of standard output")


def _time(text: str) -> float:
    """Seconds from a number with s, m, h or d, or from Slurm's ``days-hours:minutes:seconds``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text, re.ASCII)
    if match is not None:
        unit_s = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[match[2]]
        found = float(match[1]) * unit_s
    else:
        from .slurm import duration_s  # no other verb needs what it imports

        found = duration_s(text) or float("inf")
    if found < LONGEST_S:
        return found
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a time; give one such as 600, 10m, 48h or 2-00:00:00"
    )


def _code(text: str) -> int:
    if re.fullmatch(r"\d{1,3}", text, re.ASCII) and 1 <= int(text) <= 125:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} cannot be chosen as exit code; give 1 to 125")
