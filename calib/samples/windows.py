"""Which windows of a run a sample table holds, and the rows of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import CalibrationError
from .table import SampleTable


def windows_of(table: SampleTable) -> list[int]:
    """Windows of the newest run that have an unflagged step, oldest first."""
    steps = table.steps[table.steps["run_id"] == table.run_id]
    windows = sorted(int(w) for w in steps[steps["is_clean"]]["window"].unique())
    if not windows:
        raise CalibrationError("no window has an unflagged step; record more steps")
    return windows


def only_windows(table: SampleTable, windows: Sequence[int]) -> SampleTable:
    """The newest run's rows of these windows."""

    def keep(frame: Any) -> Any:
        return frame[(frame["run_id"] == table.run_id) & frame["window"].isin(list(windows))]

    return replace(
        table,
        samples=keep(table.samples),
        steps=keep(table.steps),
        phases=keep(table.phases),
        skew=keep(table.skew),
        arrivals=keep(table.arrivals),
        clocks=keep(table.clocks),
        links=keep(table.links),
        ranks=keep(table.ranks),
        coverage=keep(table.coverage),
        windows=keep(table.windows),
    )
