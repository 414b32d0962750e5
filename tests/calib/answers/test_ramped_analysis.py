"""A recorded run as if its batch size were to double later: every number is of the right size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.calib.answers.analysis import analyse
from forerun.calib.answers.answer import Answer
from forerun.calib.answers.request import Request
from forerun.calib.forecast.modelled import batch_size_at
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import SampleTable, build_table
from forerun.calib.workload.config import Batch, Cadence, RunConfig

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
RECORDED, NUM_BEFORE = 16, 100


def golden(cadence: Cadence, size: int = RECORDED) -> SampleTable:
    table = build_table(read_run(GOLDEN))
    config = table.config()
    batch = replace(config.batch, global_batch_size=size)
    config_text = json.dumps(replace(config, cadence=cadence, batch=batch).to_json())
    return replace(table, runs=table.runs.assign(config=config_text))


def answer(cadence: Cadence, size: int = RECORDED) -> Answer:
    return analyse(golden(cadence, size), Request(now_unix_s=1e9, last_step=11))


@pytest.fixture(scope="module")
def plain() -> Answer:
    return answer(Cadence(train_iters=200))


@pytest.fixture(scope="module")
def ramped() -> Answer:
    ramp = (RECORDED, RECORDED, RECORDED * NUM_BEFORE)
    return answer(Cadence(train_iters=200, rampup_batch_size=ramp, full_batch_size=2 * RECORDED))


def test_megatron_saves_where_the_ramp_changes() -> None:
    """``--rampup-batch-size 8 4 400`` to 16: a run of core_v0.16.1 saved after steps 25 and 42."""
    config = RunConfig.from_json(build_table(read_run(GOLDEN)).config().to_json())
    config = replace(
        config,
        batch=Batch(micro_batch_size=2, global_batch_size=8),
        cadence=Cadence(train_iters=998, rampup_batch_size=(8, 4, 400), full_batch_size=16),
    )
    sizes = [batch_size_at(config, step) for step in (1, 25, 26, 42, 43, 998)]
    assert sizes == [8, 8, 12, 12, 16, 16]


@pytest.mark.slow
def test_steps_behind_the_ramp_are_longer_and_the_window_is_as_it_was(
    plain: Answer, ramped: Answer
) -> None:
    assert (
        ramped.known.model_forecast.running_estimate.time_s
        == plain.known.model_forecast.running_estimate.time_s
    )
    assert ramped.predicted_step(50) == ramped.predicted_step(NUM_BEFORE)
    before, after = ramped.predicted_step(NUM_BEFORE), ramped.predicted_step(NUM_BEFORE + 1)
    # Twice the micro-batches, one optimizer step and one reduction as before.
    assert 1.3 < after.time_s / before.time_s < 2.0
    assert after.high_s / after.time_s >= before.high_s / before.time_s
    assert ramped.known.step_at(150).time_s > 1.3 * ramped.known.step_at(50).time_s
    rates = [ramped.known.throughput(1.0, number).tokens_per_s for number in (50, 150)]
    sizes = [batch_size_at(ramped.known.config, number) for number in (50, 150)]
    assert rates == [size * ramped.known.config.model.seq_length for size in sizes]
    assert sizes[0] < sizes[1]


def test_layouts_are_compared_at_the_size_that_is_left(ramped: Answer) -> None:
    assert ramped.known.plan.running.config.batch.global_batch_size == 2 * RECORDED
    ratio = ramped.predicted_step(150).time_s / ramped.predicted_step(50).time_s
    assert ramped.known.plan.running.step_time_s == pytest.approx(
        ramped.measured.step_s * ratio, rel=0.02
    )


def test_a_window_behind_the_ramp_is_modelled_at_its_own_size(plain: Answer) -> None:
    """The run described itself at half the size; its window came after the ramp."""
    ramp = (RECORDED // 2, RECORDED // 2, RECORDED // 2)
    result = answer(
        Cadence(train_iters=200, rampup_batch_size=ramp, full_batch_size=RECORDED), RECORDED // 2
    )
    assert result.known.model_forecast.running_estimate.time_s == pytest.approx(
        plain.known.model_forecast.running_estimate.time_s
    )
    assert result.predicted_step(150).time_s == pytest.approx(plain.predicted_step(150).time_s)
