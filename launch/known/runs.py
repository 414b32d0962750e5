"""Runs of a directory: the requested one, and evidence from earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import pandas as pd

from ...calib.answers.measured_steps import known_elsewhere
from ...calib.answers.run_measurements import Measurements
from ...calib.errors import ForerunError, RecordError
from ...calib.samples.columns import normalise
from ...calib.samples.store import read_run, read_table, run_ids
from ...calib.samples.table import SampleTable, build_table
from ...calib.steps.known_steps import KnownStep
from ..store.run_folders import SAMPLES, missing_run_message, paths_of, top_of
from .table_files import ImportedTables, read_imported

_T = TypeVar("_T")
NUM_EARLIER = 8
"""Maximum number of earlier runs that are read; the newest are chosen."""


class EarlierRuns:
    """Adds samples of earlier runs, so that a resumed run continues with them.  Reads each once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[str, Measurements | None] = {}

    def join(self, table: SampleTable) -> SampleTable:
        """Return the table with samples of earlier runs of the same model and layout added.

        Steps, windows and forecasts remain those of the table's run.  Unreadable runs are skipped.
        """
        running = _where_possible(table.config)
        if running is None:
            return table
        runs = self._runs(table.run_id)
        alike = {"cadence": running.cadence, "batch": running.batch}
        same = [
            run.table.samples for run in runs if replace(run.recorded_config, **alike) == running
        ]
        if not same:
            return table
        return replace(table, samples=normalise("samples", pd.concat([*same, table.samples])))

    def steps(self, table: SampleTable) -> tuple[KnownStep, ...]:
        """Return measured steps of earlier runs on the same kind of device, in any layout, and the
        steps imported into the directory."""
        running = _where_possible(table.config)
        if running is None:
            return ()
        runs = [run for run in self._runs(table.run_id) if run.device == running.device]
        known = (_where_possible(partial(known_elsewhere, run, running)) for run in runs)
        return (*(step for step in known if step is not None), *self._imported.known(running))

    @cached_property
    def _imported(self) -> ImportedTables:
        return read_imported(self._directory)

    def _runs(self, run_id: str) -> list[Measurements]:
        """Return earlier runs with a known layout, oldest first."""
        names = run_ids(self._directory)
        names = names[: names.index(run_id)] if run_id in names else ()
        described_runs = [self._run(name) for name in names[-NUM_EARLIER:]]
        return [run for run in described_runs if run is not None]

    def _run(self, name: str) -> Measurements | None:
        if name not in self._read:
            self._read[name] = _where_possible(partial(_described, self._directory, name))
        return self._read[name]


def _described(directory: Path, name: str) -> Measurements:
    measured = Measurements(table=build_table(read_run(directory, name)))
    measured.table.config()  # raises if the layout is unknown
    return measured


def _where_possible(make: Callable[[], _T]) -> _T | None:
    """Return the result of ``make``; None if the run's data are insufficient."""
    try:
        return make()
    except ForerunError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Newest run of a directory, or the requested one."""

    table: SampleTable
    problems: tuple[str, ...]
    is_of_records: bool
    """False if only the sample table exists."""
    known: tuple[KnownStep, ...] = ()
    """Steps of other runs on the same kind of device."""


def load(directory: Path, run_id: str | None) -> Loaded:
    """Return the run of ``read`` with the evidence of the directory's earlier runs."""
    loaded = read(directory, run_id)
    earlier = EarlierRuns(top_of(directory)[0])
    table = earlier.join(loaded.table) if loaded.is_of_records else loaded.table
    return replace(loaded, table=table, known=earlier.steps(table))


def read(directory: Path, run_id: str | None) -> Loaded:
    """Read a run from its records, else from the sample table.

    ``directory`` may be the folder of one launch.  Raises ``RecordError`` if there is neither, or
    if the run is not in the directory.
    """
    top, _ = top_of(directory)
    newest, run_id = newest_run_id(directory), full_run_id(directory, run_id)
    if newest is not None or (run_id is not None and run_ids(top)):
        run = read_run(top, run_id or newest)
        return Loaded(table=build_table(run), problems=run.problems, is_of_records=True)
    paths = paths_of(directory, SAMPLES)
    if not paths:
        raise RecordError(
            missing_run_message(directory)
            or f"{directory} has neither records nor {SAMPLES}; train with --calibrate "
            f"--calibrate-dir={directory} first"
        )
    table = read_table(paths[0]) if run_id is None else _table_of(paths, run_id)
    return Loaded(table=table, problems=(), is_of_records=False)


def full_run_id(directory: Path, beginning: str | None) -> str | None:
    """Return the recorded run whose id begins so, if only one does; else the text itself."""
    names = run_ids(top_of(directory)[0])
    found = [name for name in names if beginning and name.startswith(beginning)]
    return found[0] if len(found) == 1 else beginning


def newest_run_id(directory: Path) -> str | None:
    """Return the recorded run that started last; in a launch folder, the last of that launch.

    None if no run has records.
    """
    top, launch_run_ids = top_of(directory)
    return next(
        (name for name in reversed(run_ids(top)) if not launch_run_ids or name in launch_run_ids),
        None,
    )


def has_run(directory: Path) -> bool:
    """True if the directory has records or a sample table."""
    return bool(run_ids(top_of(directory)[0]) or paths_of(directory, SAMPLES))


def _table_of(paths: Sequence[Path], run_id: str) -> SampleTable:
    known_ids = []
    for table in map(read_table, paths):
        if run_id in set(table.runs["run_id"]):
            return table
        known_ids.append(table.run_id)
    raise RecordError(
        f"run {run_id!r} is not in {paths[0]}; it holds {known_ids[0]!r}"
        + (
            f", and launches beside it {', '.join(map(repr, known_ids[1:]))}"
            if known_ids[1:]
            else ""
        )
    )
