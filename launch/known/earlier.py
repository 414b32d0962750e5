"""Earlier runs in one directory: a resumed run goes on with their samples and their steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from ...calib.answers.run_steps import known_elsewhere
from ...calib.errors import ForerunError
from ...calib.samples.store import read_run, run_ids
from ...calib.samples.table import SampleTable, build_table, normalise
from ...calib.steps.known import KnownStep
from ...calib.workload.config import RunConfig
from .imported_tables import ImportedTables, read_imported

NUM_EARLIER = 8
"""Runs that are read at most: the newest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    config: RunConfig
    samples: pd.DataFrame
    step: Callable[[RunConfig], KnownStep | None]
    """What it says of its layout's step, to a run in another layout."""


class Earlier:
    """Joins what earlier runs sampled; they are read once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, _Run | None] = {}
        self._imported: ImportedTables | None = None

    def join(self, table: SampleTable) -> SampleTable:
        """The table with the samples of earlier runs that trained the same model in this layout.

        Steps, windows and forecasts stay those of the table's own run.  Runs that cannot be read
        are passed over.
        """
        own = _config(table)
        same = (
            []
            if own is None
            else [
                run.samples
                for run in self._runs(table.run_id)
                if replace(run.config, cadence=own.cadence, batch=own.batch) == own
            ]
        )
        if not same:
            return table
        return replace(table, samples=normalise("samples", pd.concat([*same, table.samples])))

    def steps(self, table: SampleTable) -> tuple[KnownStep, ...]:
        """The measured steps of earlier runs on the same kind of device, in any layout, and those
        that were imported into the directory."""
        own = _config(table)
        if own is None:
            return ()
        runs = [run for run in self._runs(table.run_id) if run.config.device == own.device]
        found = [run.step(own) for run in runs]
        if self._imported is None:
            self._imported = read_imported(self._directory)
        return (*(step for step in found if step is not None), *self._imported.known(own))

    def _runs(self, run_id: str) -> list[_Run]:
        """Those before a run, oldest first."""
        names = run_ids(self._directory)
        names = names[: names.index(run_id)] if run_id in names else ()
        found = [self._read(name) for name in names[-NUM_EARLIER:]]
        return [run for run in found if run is not None]

    def _read(self, name: str) -> _Run | None:
        if name not in self._known:
            try:
                table = build_table(read_run(self._directory, name))
                self._known[name] = _Run(
                    config=table.config(), samples=table.samples, step=_step_of(table)
                )
            except ForerunError:
                self._known[name] = None
        return self._known[name]


def _step_of(table: SampleTable) -> Callable[[RunConfig], KnownStep | None]:
    """Only what is needed of the table is kept."""
    kept = replace(table, samples=table.samples.iloc[:0])

    def step(asked: RunConfig) -> KnownStep | None:
        try:
            return known_elsewhere(kept, asked)
        except ForerunError:
            return None

    return step


def _config(table: SampleTable) -> RunConfig | None:
    try:
        return table.config()
    except ForerunError:
        return None
