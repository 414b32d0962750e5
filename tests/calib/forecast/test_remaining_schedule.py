"""Agenda: batch sizes as Megatron's own calculator gives them, step by step."""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.errors import ConfigError
from forerun.calib.forecast.remaining_schedule import (
    BatchLevel,
    ramp_levels,
    remaining_schedule,
    schedule_levels,
    step_groups,
)
from forerun.calib.workload.config import Cadence

pytest.importorskip("megatron")


@cache
def calculators() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("megatron.core.num_microbatches_calculator")


def megatron_batches(start: int, increment: int, samples: int, full: int, steps: int) -> list[int]:
    calculator = calculators().RampupBatchsizeNumMicroBatchesCalculator(
        full, 1, 1, False, 1, start, increment, samples
    )
    consumed, out = 0, []
    for _ in range(steps):
        calculator.update(consumed, False)
        out.append(calculator.get_current_global_batch_size())
        consumed += out[-1]
    return out


@pytest.mark.slow
@given(
    start=st.integers(1, 40),
    increment=st.integers(1, 20),
    count=st.integers(1, 12),
    samples=st.integers(1, 3000),
    steps=st.integers(1, 120),
)
def test_ramp_is_megatrons(start: int, increment: int, count: int, samples: int, steps: int):
    full = start + count * increment
    groups = step_groups(steps, ramp_levels((start, increment, samples), full))
    ours = [g.global_batch_size for g in groups for _ in range(g.num_steps)]
    assert ours == megatron_batches(start, increment, samples, full, steps)


def test_without_a_ramp_there_is_one_group():
    (group,) = step_groups(50, ramp_levels((), 64))
    assert (group.begin, group.end, group.global_batch_size) == (0, 50, 64)


@given(
    done=st.integers(0, 60),
    total=st.integers(1, 60),
    evals=st.integers(0, 20),
    saves=st.integers(0, 20),
    ramp=st.integers(0, 900),
)
def test_counts_are_those_of_the_training_loop(
    done: int, total: int, evals: int, saves: int, ramp: int
):
    """The loop of ``train``, walked: evaluate, save, save where the batch grows and at the end."""
    levels = ramp_levels((8, 8, ramp), 32) if ramp else ramp_levels((), 32)
    batches = megatron_batches(8, 8, ramp, 32, total) if ramp else [32] * total
    num_evals = num_saves = 0
    for iteration in range(total):
        is_ahead = iteration >= done
        if iteration and batches[iteration] != batches[iteration - 1]:
            num_saves += iteration > done
        if evals and (iteration + 1) % evals == 0:
            num_evals += is_ahead
        if saves and (iteration + 1) % saves == 0:
            num_saves += is_ahead
    if done < total:
        num_evals += 2
        num_saves += not (saves and total % saves == 0)
    result = remaining_schedule(
        Cadence(eval_iters=1, eval_interval=evals, num_final_evals=2, save_interval=saves),
        levels,
        steps_done=done,
        steps_total=total,
        is_saving=True,
    )
    assert result.num_steps == max(0, total - done)
    assert (result.num_evals, result.num_saves) == (num_evals, num_saves)


def test_nothing_is_saved_without_a_place():
    result = remaining_schedule(
        Cadence(save_interval=2),
        (BatchLevel(from_samples=0, global_batch_size=4),),
        steps_done=0,
        steps_total=10,
        is_saving=False,
    )
    assert result.num_saves == 0


def walked_schedule(pairs: list[tuple[int, int]], steps: int) -> list[int]:
    """``StepBatchsizeNumMicroBatchesCalculator`` of core 0.19, walked: the last entry reached."""
    consumed, out = 0, []
    for _ in range(steps):
        out.append([size for threshold, size in pairs if consumed >= threshold][-1])
        consumed += out[-1]
    return out


@given(
    more=st.lists(
        st.tuples(st.integers(1, 3000), st.integers(1, 64)),
        max_size=5,
        unique_by=lambda pair: pair[0],
    ),
    first=st.integers(1, 64),
    steps=st.integers(1, 150),
)
def test_a_schedule_is_walked_as_megatron_does(
    more: list[tuple[int, int]], first: int, steps: int
) -> None:
    length = 8
    pairs = [(0, first), *sorted(more)]
    text = " ".join(f"{threshold * length}:{size}" for threshold, size in pairs)
    groups = step_groups(steps, schedule_levels(text, seq_length=length))
    ours = [g.global_batch_size for g in groups for _ in range(g.num_steps)]
    assert ours == walked_schedule(pairs, steps)
    if hasattr(calculators(), "StepBatchsizeNumMicroBatchesCalculator"):
        calculator = calculators().StepBatchsizeNumMicroBatchesCalculator
        assert calculator._parse_schedule(text, length) == pairs


def test_a_schedule_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a number"):
        schedule_levels("0:8 many:16", seq_length=8)
