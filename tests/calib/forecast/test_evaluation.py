"""Forecasts against ends that are known: errors, coverage and settling by closed forms."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from forerun.calib.forecast._remaining_time import RemainingTime
from forerun.calib.forecast.evaluation import Ended, evaluate, is_held
from forerun.calib.forecast.forecast_record import NOMINAL_FRAC, Forecast, ForecastPart
from forerun.calib.workload.config_json import decode

START_UNIX_S, TOTAL_S = 1000.0, 400.0


def made(iteration: int, error_s: float, *, half_s: float = 10.0) -> Forecast:
    """A forecast that is off by ``error_s``, in a run of 100 steps of 4 s each."""
    now, finish = START_UNIX_S + 4.0 * iteration, START_UNIX_S + TOTAL_S + error_s
    return Forecast(
        now_unix_s=now,
        steps_done=iteration,
        steps_left=100 - iteration,
        elapsed_s=4.0 * iteration,
        finish_p50_unix_s=finish,
        finish_p95_unix_s=finish + half_s,
        remaining_low_s=max(0.0, finish - half_s - now),
        remaining_s=finish - now,
        remaining_high_s=finish + half_s - now,
        finish_intervals_unix_s={
            str(share): (finish - half_s * share, finish + half_s * share) for share in NOMINAL_FRAC
        },
    )


def ended(iteration: int = 100, **more: int) -> Ended:
    end = START_UNIX_S + TOTAL_S
    return Ended(
        run_id="r",
        last_step_unix_s=end - 1.0,
        end_unix_s=end,
        iteration=iteration,
        steps_total=100,
        **more,
    )


def test_errors_are_shares_of_what_was_left_and_of_the_whole() -> None:
    evaluation = evaluate([made(75, -10.0), made(20, 32.0)], ended())
    first, last = evaluation.errors
    assert (first.iteration, first.of_total_frac, first.of_left_frac) == (20, 0.08, 0.1)
    assert (last.of_total_frac, last.of_left_frac) == (-0.025, -0.1)
    assert not first.is_inside and not first.is_beyond_p95
    assert last.is_inside and evaluation.total_s == TOTAL_S
    assert evaluate([made(75, -10.1)], ended()).errors[0].is_beyond_p95


def test_settled_is_the_first_forecast_after_which_none_was_outside() -> None:
    errors = {10: 0.03, 20: 0.08, 30: -0.04, 40: 0.01, 50: 0.03, 60: 0.0, 70: -0.02}
    evaluation = evaluate([made(at, share * TOTAL_S) for at, share in errors.items()], ended())
    five, two = evaluation.settled
    assert (five.first_iteration, five.stays_from_iteration) == (10, 30)
    assert (two.first_iteration, two.stays_from_iteration) == (40, 60)
    never = evaluate([made(10, 0.5 * TOTAL_S)], ended()).settled[0]
    assert (never.first_iteration, never.stays_from_iteration) == (None, None)


def test_a_run_that_did_not_get_there_has_no_finish() -> None:
    evaluation = evaluate([made(20, 0.0)], ended(60, num_steps=10, num_inside={"0.9": 8}))
    assert (evaluation.is_complete, evaluation.errors) == (False, ())
    assert evaluation.first_error_of_total_frac is None
    assert all(row.num == 0 for row in evaluation.finish_coverage)
    assert evaluation.step_coverage[2].observed_frac == 0.8


def test_forecasts_after_the_last_step_foretell_nothing() -> None:
    assert evaluate([made(20, 4.0), made(100, 0.0)], ended()).num_forecasts == 1


def test_intervals_of_planted_normal_errors_hold_as_often_as_they_say(
    steady: Callable[..., Forecast],
) -> None:
    """Ends drawn from the forecast's own distribution; 2,000 draws, four standard errors."""
    forecast = steady()
    past = Forecast.from_line(forecast.to_line())
    draws = forecast.remaining_time.nodes(2000)
    ends = [
        replace(ended(), last_step_unix_s=0.0, end_unix_s=forecast.now_unix_s + float(remaining_s))
        for remaining_s in draws
    ]
    for rows in zip(*(evaluate([past], end).finish_coverage for end in ends), strict=True):
        observed_frac = sum(row.num_inside for row in rows) / len(rows)
        assert observed_frac == pytest.approx(rows[0].nominal_frac, abs=0.002)


def test_single_steps_are_counted_at_every_level() -> None:
    """Quantiles of the normal distribution whose 90 % interval is given."""
    half_s, num_inside = float(stats.norm.ppf(0.95)), Counter[str]()
    for value in stats.norm.ppf((np.arange(2000) + 0.5) / 2000):
        num_inside.update(is_held(10.0 + float(value), 10.0 - half_s, 10.0 + half_s))
    for share in NOMINAL_FRAC:
        assert num_inside[str(share)] / 2000 == pytest.approx(share, abs=0.002)


def test_forecasts_read_back_whole_but_for_the_distribution(
    steady: Callable[..., Forecast],
) -> None:
    forecast = replace(steady(), breakdown=(ForecastPart.repeated("eval", 2, 1.0),))
    read = decode(Forecast, json.loads(json.dumps(forecast.to_json())))
    assert read == replace(forecast, remaining_time=RemainingTime())


def test_lines_read_back(steady: Callable[..., Forecast]) -> None:
    forecast = steady()
    line = json.loads(json.dumps(forecast.to_line()))
    read = Forecast.from_line(line)
    ours, theirs = forecast.to_json(), read.to_json()
    absent = ("steps_s", "parts", "gpu_hours", "cost", "energy_j")
    assert ours.keys() == theirs.keys()
    for name in ours.keys() - absent:
        assert theirs[name] == pytest.approx(ours[name], abs=1e-6), name
    ends = read.finish_low_unix_s, read.finish_p95_unix_s
    assert read.finish_intervals_unix_s["0.9"] == pytest.approx(ends)


def test_an_end_reads_back() -> None:
    end = ended(num_steps=3, num_inside={"0.5": 1})
    assert decode(Ended, json.loads(json.dumps(end.to_json()))) == end
