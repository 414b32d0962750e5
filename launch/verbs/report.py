"""``forerun report``: report of a calibrated run; needs no torch.

The printed text is cached, so that unchanged files need no new fit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from contextlib import redirect_stdout
from operator import itemgetter
from typing import Any

from ...calib.errors import RecordError
from ...calib.records.files import CREATED
from ..store.cached_file import CachedFile
from ..store.run_folders import missing_run_message
from .arguments import ExitCode, add_file_schema, declare, print_json
from .run_arguments import add_run

_NAMES = ("request.json", "answer.json", "forecast.json", "decision.json", "forecasts.jsonl")
_READ = tuple(folder + name for folder in ("", "runs/", "runs/*/") for name in _NAMES)
"""Files that a report reads in addition to the records."""
_LOOKS = ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM", "TTY_COMPATIBLE")
"""Variables that affect the rendering of tables, in addition to the terminal."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    add_run(sub)
    add_file_schema(sub)
    declare(sub, "--full  every table, and every row of each")


def run(args: argparse.Namespace) -> int:
    """Print the report of a run; return 1 if the advice is to stop."""
    if sys.stdout is None:
        return _answer(args)
    looks = sys.stdout.isatty(), shutil.get_terminal_size().columns, *map(os.environ.get, _LOOKS)
    question = [args.run_id, args.json, args.full, *looks]
    cached = CachedFile("report-*.json", question, args.directory, read=_READ)
    try:
        code, text = itemgetter("code", "text")(json.loads(cached.read()))
    except (ValueError, TypeError, LookupError):  # nothing was cached, or it is damaged
        heard: Any = _Heard(sys.stdout)
        with redirect_stdout(heard):
            code = _answer(args)
        cached.write(json.dumps({**CREATED, "code": code, "text": heard.text}).encode())
    else:
        sys.stdout.write(text)
    return code


def _answer(args: argparse.Namespace) -> int:
    from ..opened.run import load
    from ..views.table import print_parts  # slow to import

    if lacking := missing_run_message(args.directory):
        raise RecordError(lacking)
    answer = load(args.directory, run_id=args.run_id).report()
    if args.json:
        print_json(answer.to_json())
    else:
        print_parts(answer.parts() if args.full else answer.brief())
    return ExitCode.THRESHOLD if answer.is_stop else ExitCode.ANSWER


class _Heard:
    """Stream wrapper that records what is written."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.text = stream, ""

    def write(self, text: str) -> int:
        self.text += text
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
