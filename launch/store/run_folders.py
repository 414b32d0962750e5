"""Lookup of a run's files in a directory, whichever run owns the top level, and safe reading.

A file may have been replaced by anything: reading is bounded, never blocks, and follows no link.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...calib.errors import RecordError
from ...calib.plain_json import parse_json
from ...calib.records.files import read_json
from ...calib.records.run_values import LAUNCH, RUNS
from ...calib.shell import is_word

SAMPLES = "samples.parquet"
"""Sample table of a run, next to its answers."""


# Our files have kilobytes; a huge file of the same name must not fill memory.
MOST_BYTES = 4 * 2**20
_TRACES = ("records", RUNS, "imported", SAMPLES, "forecasts.jsonl", "forecast.json")
"""Names that show that a directory holds a run or a machine; any one suffices."""


def missing_run_message(directory: Path) -> str:
    """Return an error with remedy if a directory holds no run; empty if it does."""
    if not directory.is_dir():
        return f"{directory} is not a directory; give the one that --calibrate-dir named"
    if top_of(directory)[1] or any((directory / name).exists() for name in _TRACES):
        return ""
    return f"{directory} holds no run; start one with --calibrate --calibrate-dir={directory}"


def top_of(directory: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the calibrate directory, and the runs of the launch if given a launch's folder.

    The runs are empty for any other directory.
    """
    if directory.absolute().parent.name != RUNS:
        return directory, ()
    launch = read_object(directory / LAUNCH)
    names = launch.get("run_ids") if launch else None
    if not isinstance(names, list):
        return directory, ()
    return directory.absolute().parent.parent, tuple(n for n in names if isinstance(n, str))


def paths_of(directory: Path, name: str) -> list[Path]:
    """Return files of that name: at the top level, then of all launches, newest first."""
    paths = [path for path in directory.glob(f"{RUNS}/*/{name}") if path.is_file()]
    paths.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    top = directory / name
    return [top, *paths] if top.is_file() else paths


def newest_of_run(directory: Path, name: str, run_id: str) -> Mapping[str, Any] | None:
    """Return the newest readable object of that name and run; the directory's own comes first."""
    for path in (directory / name, *paths_of(top_of(directory)[0], name)):
        value = read_object(path)
        if value is not None and value.get("run_id") == run_id:
            return value
    return None


def object_of_run(directory: Path, name: str, run_id: str) -> dict[str, Any] | None:
    """Return the JSON object of that name written for a run; None if there is none.

    Damaged files are skipped if another is of this run; else raises ``RecordError`` for the first.
    """
    problem: RecordError | None = None
    for path in paths_of(directory, name):
        try:
            value = read_json(path)
        except RecordError as err:
            problem = problem or err
            continue
        if isinstance(value, dict) and value.get("run_id") == run_id:
            return value
    if problem is not None:
        raise problem
    return None


def read_bounded(
    path: Path, most_nbytes: int = MOST_BYTES, *, is_private: bool = False
) -> bytes | None:
    """Return a whole regular file; None if it is missing, unreadable, or longer than the limit.

    With ``is_private`` also None if another user owns it or others may write it.
    """
    flags = os.O_RDONLY
    for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC"):
        flags |= getattr(os, name, 0)
    try:
        handle = os.open(path, flags)
    except (OSError, ValueError):
        return None
    try:
        file_stat = os.fstat(handle)
        if not stat.S_ISREG(file_stat.st_mode):
            return None
        is_others = file_stat.st_uid != os.geteuid() or file_stat.st_mode & (
            stat.S_IWGRP | stat.S_IWOTH
        )
        if is_private and is_others:
            return None
        parts: list[bytes] = []
        remaining = most_nbytes + 1
        while remaining and (part := os.read(handle, min(remaining, 2**20))):
            parts.append(part)
            remaining -= len(part)
        return b"".join(parts) if remaining else None
    except OSError:
        return None
    finally:
        os.close(handle)


def read_object(path: Path) -> Mapping[str, Any] | None:
    """Return the JSON object of a file; None if it is missing or unreadable."""
    data = read_bounded(path)
    if data is None:
        return None
    try:
        value = parse_json(data)
    except (ValueError, MemoryError):
        return None
    return value if isinstance(value, dict) else None


def finite_number(value: object, most: float = 1e15) -> float:
    """Return a file's value as a finite number; 0.0 if it is not one, or exceeds ``most``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    try:
        converted = float(value)
    except OverflowError:
        return 0.0
    return converted if math.isfinite(converted) and abs(converted) <= most else 0.0


def command_words(value: object) -> tuple[str, ...]:
    """Return a file's value as the words of a command; empty if it is not one."""
    if not isinstance(value, list):
        return ()
    if not all(isinstance(word, str) and is_word(word) for word in value):
        return ()
    return tuple(value)
