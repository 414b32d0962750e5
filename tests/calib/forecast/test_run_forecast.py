"""The forecast of a run against one that is walked step by step, with all its times planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted_steps import steps_of

from forerun.calib.forecast.batch_ratios import BatchRatio, measured_ratios
from forerun.calib.forecast.modelled import ModelForecast, model_forecast
from forerun.calib.forecast.remaining_run import RunProgress, run_forecast
from forerun.calib.workload.config import Batch, Cadence, RunConfig
from forerun.calib.workload.run_options import Goals

EVAL_S, SAVE_S, START_S = 3.0, 1.5, 20.0
FIXED_S, PER_SAMPLE_S = 0.3, 0.05


@pytest.fixture
def view(
    layout: Callable[..., RunConfig], planted: Callable[..., Any]
) -> Callable[..., ModelForecast]:
    def make(cadence: Cadence, size: int = 16, device: str = "cpu") -> ModelForecast:
        batch = Batch(micro_batch_size=2, global_batch_size=size)
        config = replace(layout(), batch=batch, cadence=cadence, device=device)
        fitted = steps_of(planted())
        step_estimate = fitted.estimate(config)
        return model_forecast(config, fitted, step_estimate, started_unix_s=0.0)

    return make


def walk(cadence: Cadence, full: int, *, stop: int) -> tuple[RunProgress, float]:
    """Return the progress observed after ``stop`` steps, and when the run ended."""
    start, increment, samples = cadence.rampup_batch_size or (full, 1, 0)
    count = (full - start) // increment
    now, consumed, before = START_S, 0, start
    times, numbers, evals, saves = [], [], [], []
    seen = None
    for number in range(1, cadence.train_iters + 1):
        size = full
        if count and consumed <= samples:
            size = min(full, start + int(consumed / (samples / count)) * increment)
        if size != before and cadence.is_saving:
            now += SAVE_S
            saves.append(SAVE_S)
        before = size
        times.append(FIXED_S + PER_SAMPLE_S * size)
        numbers.append(number)
        now, consumed = now + times[-1], consumed + size
        if number == stop:
            seen = RunProgress(
                now_unix_s=now,
                last_step=number,
                step_times_s=tuple(times),
                step_numbers=tuple(numbers),
                eval_times_s=tuple(evals),
                save_times_s=tuple(saves),
            )
        if cadence.eval_interval and number % cadence.eval_interval == 0:
            now += EVAL_S
            evals.append(EVAL_S)
        if cadence.save_interval and number % cadence.save_interval == 0:
            now += SAVE_S
            saves.append(SAVE_S)
    now += cadence.num_final_evals * EVAL_S
    if cadence.is_saving and cadence.train_iters % cadence.save_interval:
        now += SAVE_S
    assert seen is not None
    return seen, now


@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    stop=st.integers(60, 290),
    every=st.sampled_from([20, 30, 50]),
    total=st.integers(300, 340),
    ramp=st.sampled_from([(), (8, 4, 200), (4, 4, 150)]),
)
def test_once_all_has_been_seen_the_end_is_known(
    view: Callable[..., ModelForecast], stop: int, every: int, total: int, ramp: tuple[int, ...]
) -> None:
    cadence = Cadence(
        train_iters=total,
        eval_interval=every,
        eval_iters=2,
        save_interval=every,
        rampup_batch_size=ramp,
        full_batch_size=16,
        is_saving=True,
        num_final_evals=2,
    )
    seen, end_s = walk(cadence, 16, stop=stop)
    forecast = run_forecast(view(cadence), seen)
    assert forecast.total_s == pytest.approx(end_s, rel=1e-9)
    assert forecast.remaining_low_s <= end_s - seen.now_unix_s <= forecast.remaining_high_s


def test_steps_of_sizes_to_come_are_modelled_with_an_error(
    view: Callable[..., ModelForecast],
) -> None:
    cadence = Cadence(train_iters=300, rampup_batch_size=(4, 4, 150), full_batch_size=16)
    seen, _ = walk(cadence, 16, stop=8)
    forecast = run_forecast(view(cadence, size=4), seen)
    (steps,) = forecast.breakdown
    assert "batch 16 modelled" in steps.provenance
    flat, _ = walk(Cadence(train_iters=300), 16, stop=8)
    sure = run_forecast(view(Cadence(train_iters=300)), flat)
    assert steps.sigma_s / steps.time_s > sure.breakdown[0].sigma_s / sure.breakdown[0].time_s


def test_two_sizes_give_those_between_and_beyond_by_a_line() -> None:
    random = np.random.default_rng(2)
    sizes = {4: 0.5, 8: 0.7}
    seen = {size: time_s + 1e-4 * random.standard_normal(40) for size, time_s in sizes.items()}
    modelled = {s: BatchRatio(median=s / 8, unshared_sigma_log=0.3) for s in (4, 6, 8, 16)}
    result = measured_ratios({s: v.tolist() for s, v in seen.items()}, 8, modelled)
    assert result[4].median == pytest.approx(0.5 / 0.7, rel=1e-3)
    assert result[6].median == pytest.approx(0.6 / 0.7, rel=5e-3)
    assert result[16].median == pytest.approx(1.1 / 0.7, rel=5e-3)
    assert "line" in result[16].provenance and result[4].provenance == "measured"


def test_an_exit_interval_ends_the_run_before_its_last_step(
    view: Callable[..., ModelForecast],
) -> None:
    cadence = Cadence(train_iters=300, exit_interval=70)
    seen, _ = walk(cadence, 16, stop=75)
    assert run_forecast(view(cadence), seen).steps_left == 140 - 75


def test_failures_cost_and_price(view: Callable[..., ModelForecast]) -> None:
    cadence = Cadence(train_iters=300, save_interval=50, is_saving=True)
    seen, _ = walk(cadence, 16, stop=100)
    model_run = view(cadence)
    calm = run_forecast(model_run, seen)
    assert calm.failures_s == pytest.approx(0.0) and calm.gpu_hours is None
    rough = run_forecast(
        model_run, replace(seen, goals=Goals(mtbf_hours=0.1, price_per_gpu_hour=2.0))
    )
    part = rough.breakdown[-1]
    work_s = calm.steps_s + calm.extras_s
    run_s = seen.now_unix_s
    # One failure in expectation per (given + observed without one) seconds, 600 s each and half
    # the time between saves, Poisson.
    expected = work_s / (360.0 + run_s)
    assert part.name == "failures" and part.num_left == pytest.approx(expected, rel=1e-6)
    assert part.time_s == pytest.approx(expected * (600.0 + 0.5 * 50 * 1.1), rel=1e-3)
    ranks = model_run.config.parallelism.num_ranks
    assert rough.gpu_hours == pytest.approx(rough.total_s / 3600 * ranks)
    assert rough.cost == pytest.approx(2.0 * rough.total_s / 3600 * ranks)


def test_energy_is_what_was_used_and_the_power_of_the_rest(
    view: Callable[..., ModelForecast],
) -> None:
    cadence = Cadence(train_iters=300)
    seen, _ = walk(cadence, 16, stop=100)
    forecast = run_forecast(view(cadence), replace(seen, energy_used_j=1e6, mean_power_w=500.0))
    assert forecast.energy_j == pytest.approx(1e6 + 500.0 * forecast.remaining_s)


def test_collections_and_steps_after_saves_are_counted(view: Callable[..., ModelForecast]) -> None:
    """Every tenth step takes twice as long and is flagged: it is not in the mean of the others."""
    cadence = Cadence(train_iters=300)
    seen = RunProgress(
        now_unix_s=100.0,
        last_step=100,
        step_times_s=(1.0,) * 90,
        irregular_times_s=(2.0,) * 10,
        num_regular=90,
    )
    forecast = run_forecast(view(cadence), seen)
    assert forecast.remaining_s == pytest.approx(200 + 20)
