"""A few rows of every published table of steps, as they are and with other cells."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from forerun.benchmarks.published.readers import read_steps
from forerun.calib.records.step_rows import StepRow, StepTable

GOLDEN = Path(__file__).parents[1] / "golden" / "steps"


def golden_frame(name: str) -> pd.DataFrame:
    """Published rows of one table."""
    return pd.read_csv(GOLDEN / f"{name}.csv")


def golden(name: str) -> StepTable:
    """What they come to."""
    return read_steps(golden_frame(name), name)


def like(name: str, position: int = 0, **cells: object) -> StepTable:
    """The table of one published row with other cells: the same columns, another run."""
    frame = golden_frame(name).astype(object).iloc[[position]]
    return read_steps(frame.assign(**cells), name)


def only(table: StepTable) -> StepRow:
    """The one row of a table that has no other, read or skipped."""
    assert [skip.reason for skip in table.skipped] == []
    (row,) = table.rows
    return row
