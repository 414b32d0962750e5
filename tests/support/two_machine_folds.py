"""Rows of two machines, and what holds of every fold of them."""

from __future__ import annotations

from dataclasses import replace

from step_fixtures import grid

from forerun.benchmarks.protocols.scores import Fold
from forerun.calib.records.step_rows import StepRow


def two_machines() -> list[StepRow]:
    rows = grid(depths=(8, 16))
    return [replace(row, machine="ab"[i % 2], group=f"g{i % 4}") for i, row in enumerate(rows)]


def check(fold: Fold, rows: list[StepRow]) -> None:
    assert not set(fold.train) & set(fold.test) and fold.test
    assert {rows[i].machine for i in (*fold.train, *fold.test)} == {fold.machine}
    assert not any(rows[i].flag for i in (*fold.train, *fold.test))
