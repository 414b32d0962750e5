"""The micro-batch that memory allows: against every pair asked one by one, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from planted_steps import steps_of

from forerun.calib.advice.micro_batch import (
    MicroBatchAdvice,
    faster_probability,
    micro_batch_advice,
    micro_batch_layouts,
)
from forerun.calib.advice.planning import compare
from forerun.calib.memory.peak import fit_probability, memory, memory_offset
from forerun.calib.steps.model import FittedSteps
from forerun.calib.units import format_count
from forerun.calib.workload.config import Recompute, RunConfig

Layout = Callable[..., RunConfig]
ROOMY = 10**13
PEAK_OVER = 1.25
"""Measured peak over the estimate of the running layout."""
COMMAND = ("torchrun", "train.py", "--micro-batch-size", "1", "--lr", "1e-4")


@pytest.fixture
def running(layout: Layout) -> RunConfig:
    """One sample at a time, all computed again, on a device."""
    return layout(dp=2, micro=1, recompute=Recompute.FULL, device="NVIDIA A100-SXM4-80GB")


@pytest.fixture
def steps(planted: Callable[..., Any], running: RunConfig) -> FittedSteps:
    measured_s = steps_of(planted()).estimate(running).time_s
    return steps_of(planted(), running, measured_s)


def advice(config: RunConfig, steps: FittedSteps, capacity_nbytes: int) -> MicroBatchAdvice:
    peak_nbytes = round(PEAK_OVER * memory(config).allocated_nbytes)
    return micro_batch_advice(
        config,
        steps,
        memory_capacity_nbytes=capacity_nbytes,
        memory_offset_nbytes=memory_offset(config, peak_nbytes),
        host_argv=COMMAND,
    )


def needed_nbytes(config: RunConfig) -> int:
    return memory(config).total_nbytes


@pytest.mark.parametrize("capacity_frac", [1.02, 1.05, 1.1, 1.3])
def test_every_choice_is_the_fastest_that_fits_and_none_is_missing(
    running: RunConfig, steps: FittedSteps, capacity_frac: float
) -> None:
    """Planted memory; each pair is asked one by one."""
    offset = memory_offset(running, round(PEAK_OVER * memory(running).allocated_nbytes))
    capacity = round(capacity_frac * 1.1 * (needed_nbytes(running) + offset))
    expected: dict[int, float] = {}
    for config in micro_batch_layouts(running):
        needed = memory(config, offset_nbytes=offset)
        (one,) = compare(running, [config], steps, memory_capacity_nbytes=capacity,
            memory_offset_nbytes=offset)  # fmt: skip
        is_less = needed.total_nbytes <= needed_nbytes(running) + offset
        if is_less or fit_probability(needed, capacity, is_calibrated=True) >= 0.9:
            micro = config.batch.micro_batch_size
            expected[micro] = min(expected.get(micro, np.inf), one.step_time_s)
    result = advice(running, steps, capacity)
    assert {
        one.config.batch.micro_batch_size: one.step_time_s for one in result.choices
    } == pytest.approx(expected, rel=1e-6)
    assert result.largest is not None
    assert result.largest.config.batch.micro_batch_size == max(expected)


def test_with_room_nothing_is_computed_again(running: RunConfig, steps: FittedSteps) -> None:
    result = advice(running, steps, ROOMY)
    assert [one.config.batch.micro_batch_size for one in result.choices] == [1, 2, 4, 8]
    assert all(one.config.recompute is Recompute.NONE for one in result.choices)
    assert result.best is not None and result.best.time_frac_high < 0


def test_more_memory_never_makes_the_best_slower(running: RunConfig, steps: FittedSteps) -> None:
    offset = memory_offset(running, round(PEAK_OVER * memory(running).allocated_nbytes))
    least = needed_nbytes(running) + offset
    advices = [advice(running, steps, round(least * part)) for part in (1.0, 1.1, 1.2, 1.5, 2, 4)]
    times = [min(one.step_time_s for one in choice.choices) for choice in advices]
    assert all(before >= after for before, after in pairwise(times))
    assert times[-1] < times[0]


def test_what_runs_already_fits_whatever_its_probability(
    running: RunConfig, steps: FittedSteps
) -> None:
    result = advice(running, steps, needed_nbytes(running))
    assert [one.config for one in result.choices] == [running]
    assert result.best is None and result.nearest is None
    assert "nothing that fits is surely faster" in result.line


def test_nothing_but_micro_batch_and_recompute_changes(layout: Layout) -> None:
    running = layout(tp=2, pp=2, dp=2, samples=32, par={"vp": 2, "is_optimizer_distributed": True})
    configs = micro_batch_layouts(running)
    assert len(set(configs)) == len(configs) > 20
    for one in configs:
        restored = replace(
            one,
            batch=running.batch,
            recompute=running.recompute,
            recompute_modules=running.recompute_modules,
            recompute_num_layers=running.recompute_num_layers,
        )
        assert restored == running
        assert one.num_microbatches % 2 == 0


def test_a_micro_batch_divides_every_batch_of_a_ramp(layout: Layout) -> None:
    config = layout(dp=2, micro=2, samples=16)
    cadence = replace(config.cadence, train_iters=100, rampup_batch_size=(4, 4, 64))
    ramped = replace(config, cadence=cadence)
    assert {one.batch.micro_batch_size for one in micro_batch_layouts(ramped)} == {1, 2}


def test_hosts_without_options_keep_their_recompute(layout: Layout) -> None:
    running = layout(dp=2, micro=1, framework="PyTorch 2.13.0")
    configs = micro_batch_layouts(running)
    assert [one.batch.micro_batch_size for one in configs] == [1, 2, 4, 8]
    assert {one.recompute for one in configs} == {running.recompute}


def test_what_is_not_measured_is_said(running: RunConfig, steps: FittedSteps) -> None:
    for capacity, offset, word in ((None, 0, "memory"), (ROOMY, None, "peak")):
        advice = micro_batch_advice(
            running, steps, memory_capacity_nbytes=capacity, memory_offset_nbytes=offset
        )
        assert word in advice.line and advice.best is None and not advice.choices
        assert advice.to_json()["missing"]


def test_the_line_and_the_command_say_the_same(running: RunConfig, steps: FittedSteps) -> None:
    result = advice(running, steps, ROOMY)
    assert result.best is not None
    assert result.command[:2] == COMMAND[:2] and "--lr" in result.command
    micro = result.best.config.batch.micro_batch_size
    place = result.command.index("--micro-batch-size")
    assert result.command[place + 1] == str(micro)
    assert "--recompute-granularity" not in result.command
    gain = 1 / (1 + result.best.time_frac) - 1
    tokens = running.batch.global_batch_size * running.model.seq_length
    rate = tokens / result.best.step_time_s
    assert f"micro-batch: {micro} with no recompute, now 1 with all layers again" in result.line
    assert f"{format_count(rate)} tokens/s (+{100 * gain:.1f} %)" in result.line
    best = result.to_json()["best"]
    assert isinstance(best, dict) and best["micro_batch_size"] == micro


def test_the_chance_of_a_gain_is_that_of_its_interval(
    running: RunConfig, steps: FittedSteps
) -> None:
    (unchanged,) = compare(running, [running], steps)
    assert faster_probability(unchanged) == 0.0
    ratio = {"time_frac": -0.1, "time_frac_low": -0.19, "log_ratio_sigma": -np.log(0.9) / 1.6448536}
    sure = replace(unchanged, **ratio)
    assert faster_probability(sure) == pytest.approx(0.95, abs=1e-6)
    result = advice(running, steps, ROOMY)
    assert replace(result, confidence=1.1).best is None
