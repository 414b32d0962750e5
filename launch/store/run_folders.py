"""Lookup of a run's files below a directory, and safe reading.

They are in the folder of their launch; at the top level too, where earlier versions wrote them.
A file may have been replaced by anything: reading is bounded, never blocks, and follows no link.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ...calib.errors import ForerunError, RecordError
from ...calib.plain_json import parse_json
from ...calib.records.files import read_json
from ...calib.records.run_values import LAUNCH, RUNS
from ...calib.shell import is_word
from ...calib.workload.config_json import decode
from ...hooks.process.launch_identity import is_launch_id, launch_folder

_T = TypeVar("_T")

LATEST = "latest"
"""Link in a directory to the folder of the launch whose first answer is the newest."""
DECISION = "decision.json"
"""Newest advice of a run."""
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


def latest_folder(directory: Path) -> Path | None:
    """Return the launch's folder that ``DIR/latest`` links to; None if it is not such a link."""
    try:
        folder, _, launch_id = os.readlink(directory / LATEST).partition("/")
    except (OSError, ValueError):
        return None
    is_ours = folder == RUNS and is_launch_id(launch_id)
    return launch_folder(directory, launch_id) if is_ours else None


def followed(directory: Path) -> Path:
    """Return the launch's folder if given ``DIR/latest``; any other path as it is."""
    if directory.name != LATEST:
        return directory
    return latest_folder(directory.parent) or directory


def run_ids_of(folder: Path) -> tuple[str, ...]:
    """Return the runs noted in a launch's folder, the newest last; empty if there are none."""
    launch = read_object(folder / LAUNCH) or {}
    names = launch.get("run_ids")
    return tuple(n for n in names if isinstance(n, str)) if isinstance(names, list) else ()


def top_of(directory: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the calibrate directory, and the runs of the launch if given a launch's folder.

    The runs are empty for any other directory.
    """
    folder = followed(directory).absolute()
    names = run_ids_of(folder) if folder.parent.name == RUNS else ()
    return (folder.parent.parent, names) if names else (directory, ())


def began(folder: Path) -> tuple[float, str]:
    """Return when a launch's newest run began, and its folder's name: a key to sort launches by."""
    try:
        return os.lstat(folder / LAUNCH).st_mtime, folder.name
    except OSError:
        return 0.0, folder.name


def launch_folders(directory: Path) -> list[Path]:
    """Return the folders of all launches, newest first."""
    folders = [path.parent for path in directory.glob(f"{RUNS}/*/{LAUNCH}")]
    return sorted(folders, key=began, reverse=True)


def paths_of(directory: Path, name: str) -> list[Path]:
    """Return files of that name: of all launches, newest first, then at the top level."""
    paths = sorted(directory.glob(f"{RUNS}/*/{name}"), key=lambda path: began(path.parent))
    return [path for path in (*reversed(paths), directory / name) if path.is_file()]


def newest_of_run(directory: Path, name: str, run_id: str) -> Mapping[str, Any] | None:
    """Return the readable object of that name and run in a directory, or in a launch's folder's."""
    with suppress(RecordError):
        return object_of_run(top_of(directory)[0], name, run_id)
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


def decoded_or_empty(kind: type[_T], value: Mapping[str, Any] | None) -> _T:
    """Return what a file's object holds; that of an empty one if it is missing or damaged."""
    try:
        return decode(kind, value or {})
    except ForerunError:
        return kind()
