"""What of a directory belongs to one run, whoever the top shows, and how such files are read.

Anything may have been put in the place of one: reading is bounded, never waits, follows no link.
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
from ...calib.records import LAUNCH, RUNS, read_json
from ...calib.shell import is_word

SAMPLES = "samples.parquet"
"""The sample table of a run, beside its answers."""


# Ours have kilobytes; nobody's file is read into memory whole because of its name.
MOST_BYTES = 4 * 2**20
_TRACES = ("records", RUNS, "imported", SAMPLES, "forecasts.jsonl", "forecast.json")
"""Any of these is something of a run, or of a machine."""


def missing_run_message(directory: Path) -> str:
    """That a directory holds nothing of ours, and the remedy; empty where it does."""
    if not directory.is_dir():
        return f"{directory} is not a directory; give the one that --calibrate-dir named"
    if top_of(directory)[1] or any((directory / name).exists() for name in _TRACES):
        return ""
    return f"{directory} holds no run; start one with --calibrate --calibrate-dir={directory}"


def top_of(directory: Path) -> tuple[Path, tuple[str, ...]]:
    """The calibrate directory, and the runs that are meant where it is the folder of a launch.

    No run is named for a directory that is no such folder.
    """
    if directory.absolute().parent.name != RUNS:
        return directory, ()
    launch = read_object(directory / LAUNCH)
    names = launch.get("run_ids") if launch else None
    if not isinstance(names, list):
        return directory, ()
    return directory.absolute().parent.parent, tuple(n for n in names if isinstance(n, str))


def paths_of(directory: Path, name: str) -> list[Path]:
    """The files of that name: the top's, then those of all launches, newest first."""
    paths = [path for path in directory.glob(f"{RUNS}/*/{name}") if path.is_file()]
    paths.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    top = directory / name
    return [top, *paths] if top.is_file() else paths


def newest_of_run(directory: Path, name: str, run_id: str) -> Mapping[str, Any] | None:
    """The newest readable object of that name and run, the directory's own first."""
    for path in (directory / name, *paths_of(top_of(directory)[0], name)):
        value = read_object(path)
        if value is not None and value.get("run_id") == run_id:
            return value
    return None


def object_of_run(directory: Path, name: str, run_id: str) -> dict[str, Any] | None:
    """The JSON object of that name that was written for a run; None where there is none.

    Damaged ones are passed over where another is of this run; else ``RecordError`` tells of one.
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
    """The whole of a regular file; None where there is none, it cannot be read, or it is longer.

    With ``is_private`` also None where it is another user's, or others may write it.
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
    """The JSON object of a file; None where there is none that can be read."""
    data = read_bounded(path)
    if data is None:
        return None
    try:
        value = parse_json(data)
    except (ValueError, MemoryError):
        return None
    return value if isinstance(value, dict) else None


def finite_number(value: object, most: float = 1e15) -> float:
    """A value of a file as a finite number; 0.0 where it is none, or beyond ``most``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    try:
        converted = float(value)
    except OverflowError:
        return 0.0
    return converted if math.isfinite(converted) and abs(converted) <= most else 0.0


def command_words(value: object) -> tuple[str, ...]:
    """The words of a command of a file; empty where it holds none."""
    if not isinstance(value, list):
        return ()
    if not all(isinstance(word, str) and is_word(word) for word in value):
        return ()
    return tuple(value)
