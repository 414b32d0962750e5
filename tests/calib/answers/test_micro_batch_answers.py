"""A recorded run on two ranks, asked for its micro-batch: said where it is asked for, not else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.calib.answers.analysis import analyse
from forerun.calib.answers.answer import Answer
from forerun.calib.answers.request import Request
from forerun.calib.memory.peak import memory
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import SampleTable, build_table
from forerun.calib.workload.config import Recompute
from forerun.calib.workload.run_options import Goals, MicroBatchChoice
from forerun.launch.views.answer_tables import tables_of

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
RESERVE = 1.03
"""Reserve of the allocator, as ``memory.peak`` counts it."""


@pytest.fixture(scope="module")
def table() -> SampleTable:
    return build_table(read_run(GOLDEN))


def answered(table: SampleTable, capacity_nbytes: int | None = None, **goals: Any) -> Answer:
    request = Request(now_unix_s=1e9, last_step=11, memory_capacity_nbytes=capacity_nbytes)
    return analyse(table, replace(request, goals=Goals(**goals)))


@pytest.mark.slow
def test_nothing_is_said_where_nobody_asks(table: SampleTable) -> None:
    answer = answered(table)
    assert answer.known.micro_batch is None
    assert not any("micro-batch:" in line for line in answer.transcript)
    assert "micro_batch" not in answer.to_json()["decision"]


def test_the_largest_is_the_one_that_planted_memory_has_room_for(table: SampleTable) -> None:
    """Room for the measured peak, and for what four samples take beyond it, but not eight."""
    config = table.config()
    peak = max(table.memory_peak_nbytes().values())

    def grown(micro: int) -> int:
        batch = replace(config.batch, micro_batch_size=micro)
        full = replace(config, batch=batch, recompute=Recompute.FULL)
        return memory(full).total_nbytes - memory(config).total_nbytes

    # Three deviations of 3 % lie between what surely fits and what surely does not.
    capacity = round((RESERVE + 0.04) * (peak + grown(4)))
    answer = answered(table, capacity, micro_batch=MicroBatchChoice.ADVISE)
    advice = answer.known.micro_batch
    assert advice is not None and advice.largest is not None
    largest = advice.largest.config.batch.micro_batch_size
    assert largest >= 4
    for one in advice.choices:
        assert one.memory.total_nbytes * RESERVE < capacity
    (line,) = [line for line in answer.transcript if "micro-batch:" in line]
    assert advice.line in line
    values = answer.to_json()["decision"]["micro_batch"]
    assert values["largest"]["micro_batch_size"] == largest
    assert values["memory_capacity_nbytes"] == capacity
    (shown,) = [part for part in tables_of(answer) if part.key == "micro_batches"]
    assert len(shown.rows) == len(advice.choices)


def test_a_choice_of_the_plan_is_not_predicted_otherwise_here(table: SampleTable) -> None:
    """One door: the same layout has the same step in the plan and in the advice."""
    answer = answered(table, 10**12, micro_batch=MicroBatchChoice.ADVISE)
    assert answer.known.micro_batch is not None
    planned = {one.config: one.step_time_s for one in answer.known.plan.candidates}
    both = [one for one in answer.known.micro_batch.choices if one.config in planned]
    assert both
    for one in both:
        assert one.step_time_s == pytest.approx(planned[one.config], rel=1e-9)
