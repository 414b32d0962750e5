from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from planted_steps import estimate_step
from related_noise import related_noise

from forerun.calib.errors import CalibrationError
from forerun.calib.forecast._remaining_time import Failures
from forerun.calib.forecast.forecast_record import ForecastPart
from forerun.calib.forecast.forecasts import (
    forecast,
    learned_drift_frac,
    mean_estimate,
)
from forerun.calib.regressors.estimate import Estimate
from forerun.calib.workload.config import RunConfig

NOW = 1_700_000_000.0


def predict(times: NDArray[np.float64], *, num_remaining: int, **more: Any) -> Any:
    return forecast(
        now_unix_s=NOW,
        steps_done=100,
        steps_total=100 + num_remaining,
        elapsed_s=50.0,
        step_times_s=times,
        **more,
    )


def test_constant_steps_are_counted_out() -> None:
    result = predict(
        np.full(20, 2.0),
        num_remaining=1000,
        drift_frac=0.0,
        extras=[ForecastPart.repeated("eval", 4, 10.0)],
    )
    assert (result.steps_s, result.extras_s, result.remaining_s) == (2000.0, 40.0, 2040.0)
    assert result.total_s == 2090.0
    assert result.finish_p50_unix_s == result.finish_p95_unix_s == NOW + 2040.0
    assert result.step_low_s == result.step_high_s == 2.0


@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_intervals_of_the_remaining_time_cover_what_happens(rho: float) -> None:
    """400 runs of 60 + 500 steps; the 90 % interval of the sum, without a term for drift."""
    random = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        times = 1 + related_noise(random, 560, sigma=0.05, related=rho)
        result = predict(times[:60], num_remaining=500, drift_frac=0.0)
        hits += result.remaining_low_s <= times[60:].sum() <= result.remaining_high_s
    # 0.90 +- 3 standard errors of 400 draws, below it what few blocks cost under correlation.
    assert 0.82 <= hits / 400 <= 0.97


def test_the_interval_of_one_step_covers_single_steps() -> None:
    random = np.random.default_rng(3)
    hits = total = 0
    for _ in range(100):
        times = 1 + 0.05 * random.standard_normal(50)
        result = predict(times[:30], num_remaining=20)
        inside = (times[30:] >= result.single_low_s) & (times[30:] <= result.single_high_s)
        hits, total = hits + int(inside.sum()), total + 20
    assert 0.87 <= hits / total <= 0.95


def test_positive_autocorrelation_widens_the_mean() -> None:
    random = np.random.default_rng(5)
    free = mean_estimate(related_noise(random, 400, sigma=1.0, related=0.0))
    bound = mean_estimate(related_noise(random, 400, sigma=1.0, related=0.8))
    # A first-order process has sqrt((1 + rho) / (1 - rho)) = 3 times the error.
    assert 1.5 < bound.standard_error / free.standard_error < 4.5


@given(values=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=60))
def test_blocks_never_claim_more_than_independence(values: list[float]) -> None:
    estimate = mean_estimate(values)
    assert estimate.standard_error >= estimate.sd / np.sqrt(len(values)) * (1 - 1e-12)
    assert estimate.mean == pytest.approx(np.mean(values))
    assert estimate.degrees >= 1


def test_errors_of_evaluations_and_drift_are_added() -> None:
    times = np.full(20, 1.0)
    result = predict(
        times,
        num_remaining=1000,
        drift_frac=0.02,
        extras=[ForecastPart.repeated("eval", 10, 5.0, sigma_s=1.0)],
    )
    (sigma_s,) = result.remaining_time.sigmas_s
    assert sigma_s == pytest.approx(np.hypot(20.0, 10.0) * 1.729 / 1.645, rel=1e-3)


def test_the_modelled_step_stands_in_before_the_first_steps(
    layout: Callable[..., RunConfig], planted: Callable[..., Any]
) -> None:
    estimate = estimate_step(layout(), planted())
    result = predict(np.array([]), num_remaining=100, estimate=estimate)
    assert not result.is_measured
    assert result.step_time_s == estimate.time_s
    assert result.step_low_s < estimate.time_s < result.step_high_s
    with pytest.raises(CalibrationError, match="1 measured steps and no modelled one"):
        predict(np.array([1.0]), num_remaining=100)


def test_a_finished_run_ends_now() -> None:
    result = predict(np.array([1.0, 1.1, 0.9]), num_remaining=0)
    assert result.finish_p50_unix_s == result.finish_p95_unix_s == NOW


def test_json_has_its_schema_and_every_number() -> None:
    value = predict(np.array([1.0, 1.1, 0.9]), num_remaining=10).to_json()
    assert value["schema"] == 1
    assert value["finish_p95_unix_s"] > value["finish_p50_unix_s"] > NOW


def test_steps_of_other_batch_sizes_are_longer() -> None:
    twice = Estimate(median=2.0, unshared_sigma_log=0.1)
    loads = [(10, Estimate(median=1.0)), (30, twice)]
    result = predict(np.full(20, 1.0), num_remaining=40, drift_frac=0.0, loads=loads)
    assert result.steps_s == 70.0
    (sigma_s,) = result.remaining_time.sigmas_s
    assert sigma_s == pytest.approx(0.1 * 60.0 * 1.729 / 1.645, rel=1e-3)


def test_failures_are_expected_to_cost_their_share() -> None:
    failures = Failures(mtbf_s=500.0, restart_s=20.0, save_every_s=60.0)
    result = predict(np.full(20, 1.0), num_remaining=1000, drift_frac=0.0, failures=failures)
    assert result.failures_s == pytest.approx(2 * (20.0 + 30.0), rel=1e-3)
    assert result.remaining_low_s >= 999.99
    assert result.remaining_high_s > 1000.0 + 2 * 50.0


def test_the_drift_of_a_run_is_learned_from_its_blocks() -> None:
    random = np.random.default_rng(9)
    steady = 1 + 0.02 * random.standard_normal(2000)
    level = np.repeat([0.95, 1.05, 0.95, 1.05, 0.95, 1.05], 333)
    assert learned_drift_frac(steady[:50], prior_frac=0.01) == 0.01
    assert learned_drift_frac(steady, prior_frac=0.01) < 0.009
    value = learned_drift_frac(steady[:1998] * level, prior_frac=0.01)
    assert value == pytest.approx(np.sqrt((8 * 0.01**2 + 5 * 0.0548**2) / 13), rel=0.1)
