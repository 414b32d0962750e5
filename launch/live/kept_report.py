"""``forerun report``, kept: the same files give the same words, and no fit.

Kept is what was printed.  Where the run's own question is not known it is asked of the moment, and
nothing is kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from ...calib.errors import RecordError
from ..commands.outcome import ExitCode
from ..directory.bounded_files import read_object
from ..directory.run_folders import nothing_in, paths_of, top_of
from ..store.cached_file import CachedFile

_ANSWERS = "..commands.report_command"
_REQUEST = "request.json"
_READ = tuple(
    f"{folder}{name}"
    for folder in ("", "runs/*/")
    for name in (_REQUEST, "calibration.json", "forecast.json", "decision.json", "forecasts.jsonl")
)
"""What a report reads beside the records."""
_LOOKS = ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM", "TTY_COMPATIBLE")


def report(args: argparse.Namespace) -> int:
    """Print what the run says of itself; 1 where the advice is to stop."""
    kept = None
    if sys.stdout is not None and sys.stderr is not None and _is_asked(args.directory, args.run_id):
        question = [args.run_id, args.json, *_looks()]
        kept = CachedFile("report-*.json", question, args.directory, read=_READ)
        if body := kept.read():
            return _printed(json.loads(body))
    answer = importlib.import_module(_ANSWERS, __package__).report
    if lacking := nothing_in(args.directory):
        raise RecordError(lacking)
    if kept is None:
        return int(answer(args))
    with _heard("stdout") as out, _heard("stderr") as err:
        code = int(answer(args))
    value = {"code": code, "stdout": "".join(out), "stderr": "".join(err)}
    kept.write(json.dumps(value).encode())
    return code


def _printed(value: dict[str, Any]) -> ExitCode:
    sys.stderr.write(value["stderr"])
    sys.stdout.write(value["stdout"])
    return ExitCode(value["code"])


def _looks() -> list[object]:
    """What decides on the width and the looks of tables."""
    if not sys.stdout.isatty():
        return [False]
    size = shutil.get_terminal_size()
    return [True, size.columns, *(os.environ.get(name) for name in _LOOKS)]


def _is_asked(directory: Path, run_id: str | None) -> bool:
    """Whether the question of every run that may be meant is known."""
    top, own = top_of(directory)
    records = top / "records"
    names = {run_id} if run_id else {*own} or {path.name for path in records.glob("*")}
    asked = [read_object(path) or {} for path in paths_of(top, _REQUEST)]
    return names <= {value.get("run_id") for value in asked}


class _Heard:
    """A stream that remembers what goes through it, and is else the stream."""

    def __init__(self, stream: TextIO, heard: list[str]) -> None:
        self._stream, self._heard = stream, heard

    def write(self, text: str) -> int:
        self._heard.append(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _heard(name: str) -> Iterator[list[str]]:
    stream, heard = getattr(sys, name), list[str]()
    setattr(sys, name, _Heard(stream, heard))
    try:
        yield heard
    finally:
        setattr(sys, name, stream)
