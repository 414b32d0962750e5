"""A few rows of every published table of steps, unchanged and with modified cells."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from forerun.benchmarks.published.readers import read_steps
from forerun.calib.records.step_rows import StepRow, StepTable

GOLDEN = Path(__file__).parents[1] / "golden" / "steps"


def golden_frame(name: str) -> pd.DataFrame:
    """Return the published rows of one table."""
    return pd.read_csv(GOLDEN / f"{name}.csv")


def golden(name: str) -> StepTable:
    """Return the canonical rows of one table."""
    return read_steps(golden_frame(name), name)


def modified_row(name: str, position: int = 0, **cells: object) -> StepTable:
    """Return the table of one published row with modified cells: the same columns, another run."""
    frame = golden_frame(name).astype(object).iloc[[position]]
    return read_steps(frame.assign(**cells), name)


def only(table: StepTable) -> StepRow:
    """Return the only row of a table, none being skipped."""
    assert [skip.reason for skip in table.skipped] == []
    (row,) = table.rows
    return row
