"""``forerun status``: where the runs of a directory are now."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..outcome import ExitCode, print_json, tell
from .run_status import RunStatus, run_statuses
from .status_text import status_line, status_lines


def status(args: argparse.Namespace) -> int:
    """Print what each launch says now; 1 where one is advised to stop."""
    now_unix_s = time.time()
    found, problems = run_statuses(args.directory, now_unix_s, args.run_id)
    if args.json:
        print_json(status_json(args.directory, now_unix_s, found, problems))
    else:
        tell(*problems)
        print("\n".join(text_lines(found)))
    return exit_code(found)


def status_json(
    directory: Path, now_unix_s: float, found: Sequence[RunStatus], problems: Sequence[str]
) -> dict[str, Any]:
    """The answer for programs."""
    return {
        "directory": str(directory),
        "now_unix_s": now_unix_s,
        "runs": [one.to_json() for one in found],
        "problems": list(problems),
    }


def text_lines(found: Sequence[RunStatus]) -> list[str]:
    """All that is known of one run, or a line for each of several."""
    return status_lines(found[0]) if len(found) == 1 else [status_line(one) for one in found]


def exit_code(found: Sequence[RunStatus]) -> ExitCode:
    """Whether a threshold is crossed."""
    is_stop = any(one.is_stop_advised for one in found)
    return ExitCode.THRESHOLD if is_stop else ExitCode.ANSWER
