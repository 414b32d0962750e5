"""A recorded run on two ranks: larger micro-batches are rows of its plan, as memory allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forerun.calib.answers.analysis import analyse
from forerun.calib.answers.answer import Answer
from forerun.calib.answers.request import Request
from forerun.calib.answers.run_measurements import Measurements
from forerun.calib.memory.peak import memory
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import SampleTable, build_table
from forerun.calib.workload.config import Recompute
from forerun.launch.views.answer_tables import tables_of

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
RESERVE = 1.03
"""Reserve of the allocator, as ``memory.peak`` counts it."""


@pytest.fixture(scope="module")
def table() -> SampleTable:
    return build_table(read_run(GOLDEN))


def answered(table: SampleTable, capacity_nbytes: int) -> Answer:
    return analyse(
        table, Request(now_unix_s=1e9, last_step=11, memory_capacity_nbytes=capacity_nbytes)
    )


def test_the_largest_is_the_one_that_planted_memory_has_room_for(table: SampleTable) -> None:
    """Room for the measured peak, and for what four samples take beyond it, but not eight."""
    config = table.config()
    peak = Measurements(table=table).memory_peak_nbytes

    def grown(micro: int) -> int:
        batch = replace(config.batch, micro_batch_size=micro)
        full = replace(config, batch=batch, recompute=Recompute.FULL)
        return memory(full).total_nbytes - memory(config).total_nbytes

    # Three deviations of 3 % lie between what surely fits and what surely does not.
    capacity = round((RESERVE + 0.04) * (peak + grown(4)))
    plan = answered(table, capacity).known.plan
    rows = [one for one in plan.candidates if one.config.parallelism == config.parallelism]
    assert {one.config.batch.micro_batch_size for one in rows} >= {1, 4, 8}
    for one in rows:
        assert one.memory.total_nbytes * RESERVE < capacity
        is_plain = one.config.recompute is Recompute.NONE
        assert one.config.batch.micro_batch_size <= 4 or not is_plain


def test_a_faster_micro_batch_is_a_row_and_the_line(table: SampleTable) -> None:
    answer = answered(table, 10**12)
    plan = answer.known.plan
    assert plan.best is not None and plan.best.time_frac < 0
    running, best = plan.running.config, plan.best.config
    assert best.parallelism == running.parallelism
    assert best.batch.micro_batch_size > running.batch.micro_batch_size
    (line,) = [line for line in answer.transcript if "faster here: " in line]
    assert f"micro-batch {best.batch.micro_batch_size}" in line
    (shown,) = [part for part in tables_of(answer) if part.key == "layouts"]
    assert any(f"mbs{best.batch.micro_batch_size}" in row[1] for row in shown.rows)
