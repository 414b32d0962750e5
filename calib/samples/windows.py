"""Which windows of a run a sample table holds, and the rows of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import CalibrationError
from .columns import FRAMES
from .table import SampleTable

_OF_RUNS = ("runs", "traced")
"""Frames that stay whole: headers have no window, and only one window of a run is traced."""


def windows_of(table: SampleTable) -> list[int]:
    """Windows of the newest run that have a clean step, oldest first."""
    steps = table.newest("steps")
    windows = sorted(int(w) for w in steps[steps["is_clean"]]["window"].unique())
    if not windows:
        raise CalibrationError("no window has a clean step; record more steps")
    return windows


def only_windows(table: SampleTable, windows: Sequence[int]) -> SampleTable:
    """The newest run's rows of these windows."""
    run_id = table.run_id
    frames = {name: getattr(table, name) for name in FRAMES if name not in _OF_RUNS}
    return replace(
        table,
        **{
            name: frame[(frame["run_id"] == run_id) & frame["window"].isin(windows)]
            for name, frame in frames.items()
        },
    )
