"""Drift on planted changes in noise as training has it: related neighbours, outliers, saves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from related_noise import related_noise

from forerun.calib.drift.monitor import ChangePoints, Drift, DriftKind, DriftMonitor

STEP_S = 1.6


def noisy(count: int, seed: int, *, sigma: float = 0.015, related: float = 0.3) -> np.ndarray:
    """Step times of a steady run: log-normal, lag-one autocorrelation, one outlier in 100."""
    rng = np.random.default_rng(seed)
    times = STEP_S * np.exp(related_noise(rng, count, sigma=sigma, related=related))
    times[rng.random(count) < 0.01] *= rng.uniform(1.2, 4.0)
    return times


def drifts(times: np.ndarray) -> list[Drift]:
    watch = DriftMonitor()
    alarms = (watch.add(step, time_s) for step, time_s in enumerate(times.tolist()))
    return [drift for drift in alarms if drift is not None]


@pytest.mark.slow
def test_no_alarm_in_ten_thousand_steady_steps():
    assert [d for seed in range(5) for d in drifts(noisy(2000, seed))] == []


@pytest.mark.parametrize("change", [0.12, 0.15, 0.30, -0.15])
def test_a_lasting_change_is_found_within_fifteen_steps(change: float):
    num_in_time = 0
    for seed in range(60):
        times, start = noisy(160, 100 + seed), 60 + seed
        times[start:] *= 1 + change
        result = drifts(times)
        assert [d for d in result if d.iteration < start] == []
        in_time = [d for d in result if d.iteration < start + 15]
        num_in_time += bool(in_time)
        if in_time:
            assert in_time[0].kind is (DriftKind.SLOWER if change > 0 else DriftKind.FASTER)
            assert abs(in_time[0].since_iteration - start) <= 3
            assert in_time[0].change_frac == pytest.approx(change, abs=0.05)
    assert num_in_time >= 57


def test_recovery_is_named_and_becomes_the_baseline():
    times = noisy(400, 7)
    times[100:200] *= 1.2
    times[300:] *= 1.2
    kinds = [d.kind for d in drifts(times)]
    assert kinds == [DriftKind.SLOWER, DriftKind.RECOVERED, DriftKind.SLOWER]


def test_changes_below_a_tenth_are_no_drift():
    times = noisy(600, 3, sigma=0.005)
    times[200:] *= 1.06
    assert drifts(times) == []


def test_a_creeping_change_is_found_once_it_has_become_a_tenth():
    times = noisy(800, 5, sigma=0.005) * (1 + np.clip(np.arange(800) - 100, 0, 400) * 0.0005)
    result = drifts(times)
    assert result
    assert result[0].kind is DriftKind.SLOWER
    assert 250 < result[0].iteration < 500


def test_single_and_periodic_outliers_are_no_drift():
    times = noisy(3000, 11)
    times[::50] *= 2.5
    assert drifts(times) == []


def test_masked_and_impossible_steps_are_passed_over():
    monitor = DriftMonitor()
    for step, time_s in enumerate(noisy(100, 1)):
        assert monitor.add(step, time_s) is None
        assert monitor.add(step, 50.0, is_masked=True) is None
        for broken in (math.nan, math.inf, 0.0, -1.0):
            assert monitor.add(step, broken) is None
    assert monitor.level_s == pytest.approx(STEP_S, rel=0.02)


def test_a_change_point_has_its_run_length():
    points, rng = ChangePoints(), np.random.default_rng(0)
    for value in [*rng.normal(0, 1, 100), *rng.normal(4, 1, 12)]:
        points.add(float(value))
    assert points.recent_probability(14) > 0.95
    assert points.recent_probability(5) < 0.05


def test_a_steady_series_has_no_recent_change():
    points, rng = ChangePoints(), np.random.default_rng(1)
    for value in rng.normal(0, 1, 400):
        points.add(float(value))
    assert points.recent_probability(50) < 0.1
