"""What of a directory belongs to one run: its own launch's files, whoever the top shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...calib.errors import RecordError
from ...calib.records import LAUNCH, RUNS, read_json
from .bounded_files import read_object

SAMPLES = "samples.parquet"
"""The sample table of a run, beside its answers."""


_TRACES = ("records", RUNS, "imported", SAMPLES, "forecasts.jsonl", "forecast.json")
"""Any of these is something of a run, or of a machine."""


def nothing_in(directory: Path) -> str:
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
    found = read_object(directory / LAUNCH)
    names = found.get("run_ids") if found else None
    if not isinstance(names, list):
        return directory, ()
    return directory.absolute().parent.parent, tuple(n for n in names if isinstance(n, str))


def paths_of(directory: Path, name: str) -> list[Path]:
    """The files of that name: the top's, then those of all launches, newest first."""
    found = [path for path in directory.glob(f"{RUNS}/*/{name}") if path.is_file()]
    found.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    top = directory / name
    return [top, *found] if top.is_file() else found


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
