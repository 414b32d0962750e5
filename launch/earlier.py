"""Earlier runs of the same layout in one directory: a resumed run goes on with their samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd

from ..calib.errors import ForerunError
from ..calib.samples.store import read_run, run_ids
from ..calib.samples.table import SampleTable, build_table, normalise
from ..calib.workload.config import RunConfig

NUM_EARLIER = 3
"""Runs that are read at most: the newest ones."""


class Earlier:
    """Joins what earlier runs sampled; they are read once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, tuple[RunConfig, pd.DataFrame] | None] = {}

    def join(self, table: SampleTable) -> SampleTable:
        """The table with the samples of earlier runs that trained the same model in this layout.

        Steps, windows and forecasts stay those of the table's own run.  Runs that cannot be read
        are passed over.
        """
        try:
            own = table.config()
        except ForerunError:
            return table
        names = run_ids(self._directory)
        names = names[: names.index(table.run_id)] if table.run_id in names else ()
        found = [known for name in names[-NUM_EARLIER:] if (known := self._read(name)) is not None]
        same = [
            samples
            for config, samples in found
            if replace(config, cadence=own.cadence, batch=own.batch) == own
        ]
        if not same:
            return table
        return replace(table, samples=normalise("samples", pd.concat([*same, table.samples])))

    def _read(self, name: str) -> tuple[RunConfig, pd.DataFrame] | None:
        if name not in self._known:
            try:
                table = build_table(read_run(self._directory, name))
                self._known[name] = table.config(), table.samples
            except ForerunError:
                self._known[name] = None
        return self._known[name]
