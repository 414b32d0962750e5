"""Columns of a table of layouts: tokens/s, TFLOP/s, MFU, and the rest of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

from ...calib.advice import Candidate
from ...calib.forecast import RestOfRun, RunLeft, rest_of_run
from ...calib.units import TERA
from .cells import count_cell, frac_cell

TOKENS, FLOP, MFU = "tokens/s", "TFLOP/s per GPU", "MFU"
GPU_HOURS, FINISH, COST = "GPU-hours left", "finish (UTC)", "cost"
SPARE = (FLOP, FINISH, GPU_HOURS, MFU)
"""Columns that a narrow screen does without, the first to go first."""
_Cells = dict[str, Callable[[Candidate], str]]


def throughput_cells(rows: Sequence[Candidate], left: RunLeft | None) -> _Cells:
    """Ways to read a layout: tokens/s, TFLOP/s and MFU where devices are known, and with ``left``
    the rest of the run."""
    cells: _Cells = {TOKENS: lambda row: count_cell(row.throughput.tokens_per_s)}
    if any(row.throughput.mfu_frac is not None for row in rows):
        cells[FLOP] = lambda row: count_cell(row.throughput.flop_per_s_per_gpu / TERA)
        cells[MFU] = lambda row: frac_cell(row.throughput.mfu_frac)
    return cells if left is None else cells | _rest_cells(left)


def rest_json(row: Candidate, left: RunLeft | None) -> dict[str, Any] | None:
    """The rest of the run in a layout, for JSON; None where nothing is known of it."""
    return None if left is None else _rest(row, left).to_json()


def _rest_cells(left: RunLeft) -> _Cells:
    cells: _Cells = {}
    if left.config.device != "cpu" or left.price_per_gpu_hour is not None:
        cells[GPU_HOURS] = lambda row: count_cell(_rest(row, left).gpu_hours, ",.4g")
    cells[FINISH] = lambda row: _moment(_rest(row, left).finish_unix_s)
    if left.price_per_gpu_hour is not None:
        cells[COST] = lambda row: count_cell(_rest(row, left).cost or 0.0, ",.2f")
    return cells


def _rest(row: Candidate, left: RunLeft) -> RestOfRun:
    return rest_of_run(left, row.config, row.step_time_s)


def _moment(unix_s: float | None) -> str:
    if unix_s is None:
        return ""
    try:
        return datetime.fromtimestamp(unix_s, tz=timezone.utc).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return "beyond any calendar"
