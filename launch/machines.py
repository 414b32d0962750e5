"""The one door of the verbs to a step model: a calibrated run, or a machine that was imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..calib.errors import RecordError
from ..calib.evidence import memory_offset_nbytes
from ..calib.fit.priors import device_prior
from ..calib.run_steps import known_elsewhere, run_steps
from ..calib.samples.store import read_run, read_table, run_ids
from ..calib.samples.table import SampleTable, build_table
from ..calib.steps.known import KnownStep
from ..calib.steps.model import FittedSteps
from ..calib.steps.table_steps import table_steps
from ..calib.workload.config import RunConfig
from ..calib.workload.memory import memory_offset
from .answers import SAMPLES
from .earlier import Earlier
from .imported_tables import ImportedTables, read_imported
from .run_folders import paths_of, top_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The newest run of a directory, or the one that was asked for."""

    table: SampleTable
    problems: tuple[str, ...]
    known: tuple[KnownStep, ...] = ()
    """Steps of other runs on the same kind of device."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """What a directory says of the steps of any layout."""

    name: str
    """The run, or the machine that was imported."""
    own: RunConfig
    """The layout that others are held against."""
    steps: FittedSteps
    memory_capacity_nbytes: int | None
    memory_offset_nbytes: int | None
    """What a measured peak had beyond its estimate; None where none was measured."""
    problems: tuple[str, ...] = ()


def open_machine(
    directory: Path,
    *,
    run_id: str | None = None,
    machine: str | None = None,
    also: Sequence[Path] = (),
) -> Machine:
    """The step model of a directory: of its newest run, else of what was imported into it.

    ``also`` are directories whose runs and imported rows are evidence too.  Raises ``RecordError``
    where there is neither, ``ConfigError`` where imported machines have to be told apart.
    """
    imported = read_imported(directory)
    if machine is not None or (imported.steps and run_id is None and not _has_run(directory)):
        return _imported(imported, machine)
    loaded = load(directory, run_id)
    table = loaded.table
    own = table.config()
    known = [*loaded.known, *(one for other in also for one in _elsewhere(other, own))]
    return Machine(
        name=table.run_id,
        own=own,
        steps=run_steps(table, known),
        memory_capacity_nbytes=table.device_memory_nbytes(),
        memory_offset_nbytes=memory_offset_nbytes(table),
        problems=(*loaded.problems, *imported.problems),
    )


def load(directory: Path, run_id: str | None) -> Loaded:
    """From the records where they are, else from the sample table.

    ``directory`` may be the folder of one launch.  Raises ``RecordError`` where there is neither,
    or where the run is not in the directory.
    """
    top, own = top_of(directory)
    known = run_ids(top)
    if known and (run_id is not None or not own or set(own) & set(known)):
        if run_id is None and own:
            run_id = next(name for name in reversed(known) if name in own)
        run = read_run(top, run_id)
        table, earlier = build_table(run), Earlier(top)
        return Loaded(table=earlier.join(table), problems=run.problems, known=earlier.steps(table))
    paths = paths_of(directory, SAMPLES)
    if not paths:
        raise RecordError(
            f"{directory} has neither records nor {SAMPLES}; train with --calibrate "
            f"--calibrate-dir={directory} first"
        )
    table = read_table(paths[0]) if run_id is None else _table_of(paths, run_id)
    return Loaded(table=table, problems=(), known=Earlier(top).steps(table))


def _table_of(paths: Sequence[Path], run_id: str) -> SampleTable:
    tables = (read_table(path) for path in paths)
    held = []
    for table in tables:
        if run_id in set(table.runs["run_id"]):
            return table
        held.append(table.run_id)
    raise RecordError(
        f"run {run_id!r} is not in {paths[0]}; it holds {held[0]!r}"
        + (f", and launches beside it {', '.join(map(repr, held[1:]))}" if held[1:] else "")
    )


def _has_run(directory: Path) -> bool:
    return bool(run_ids(top_of(directory)[0]) or paths_of(directory, SAMPLES))


def _imported(tables: ImportedTables, name: str | None) -> Machine:
    rows = tables.machine(name)
    last = rows[-1]
    peaks = [
        memory_offset(row.config, int(row.measured_memory_nbytes))
        for row in rows
        if row.measured_memory_nbytes
    ]
    return Machine(
        name=last.machine,
        own=last.config,
        steps=table_steps(
            rows[0], [KnownStep.of(row) for row in rows], tables.operators, tables.collectives
        ),
        memory_capacity_nbytes=None,
        memory_offset_nbytes=int(np.median(peaks)) if peaks else None,
        problems=tables.problems,
    )


def _elsewhere(directory: Path, own: RunConfig) -> tuple[KnownStep, ...]:
    """Runs and imported rows of another directory that ran on the same kind of device."""
    if not _has_run(directory):
        return read_imported(directory).known(own)
    loaded = load(directory, None)
    if device_prior(loaded.table.config().device).name != device_prior(own.device).name:
        return ()
    return (*loaded.known, known_elsewhere(loaded.table, own))
