"""The runs of a directory as the verbs read them: records where they are, else sample tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...calib.errors import RecordError
from ...calib.samples.store import read_run, read_table, run_ids
from ...calib.samples.table import SampleTable, build_table
from ...calib.steps.known import KnownStep
from ..directory.run_folders import SAMPLES, paths_of, top_of
from .earlier import Earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The newest run of a directory, or the one that was asked for."""

    table: SampleTable
    problems: tuple[str, ...]
    known: tuple[KnownStep, ...] = ()
    """Steps of other runs on the same kind of device."""


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


def has_run(directory: Path) -> bool:
    """Whether anything was recorded there."""
    return bool(run_ids(top_of(directory)[0]) or paths_of(directory, SAMPLES))


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
