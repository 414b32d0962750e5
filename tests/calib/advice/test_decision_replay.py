"""Advice on replayed runs with planted ratios: seldom wrong, and cheaper than simpler rules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import planted_decisions as planted
import pytest
from scipy import integrate, stats

from forerun.calib.advice.decision import Action, decide, selection_bias_log
from forerun.calib.advice.planning import Candidate, Plan
from forerun.calib.forecast.forecast_record import Forecast
from forerun.calib.regressors.estimate import Estimate
from forerun.calib.workload.run_options import Goals

SIGMA = 0.05


def series() -> list[np.ndarray]:
    """Autocorrelated steps with a few long ones, as published series show."""
    random = np.random.default_rng(3)
    out = []
    for _ in range(8):
        values = np.zeros(300)
        for place in range(1, 300):
            values[place] = 0.5 * values[place - 1] + 0.01 * random.standard_normal()
        out.append(np.exp(values + 0.3 * (random.random(300) < 0.01)))
    return out


def test_stops_are_seldom_wrong_and_cost_less_than_believing_the_plan() -> None:
    """180 replays in which every layout loses: 5 % of them wrong would be 9."""
    random, layout, steps = np.random.default_rng(0), planted.base_layout(), series()
    outcomes = [
        planted.replay(
            planted.Case(saving_frac=saving, cost_frac=cost, noise_log=noise, num_layouts=count),
            steps,
            random,
            layout,
        )
        for saving, cost, noise, count in itertools.product(
            (0.0, 0.05, 0.2), (0.015, 0.06), (0.02, 0.1), (1, 10, 50)
        )
        for _ in range(10)
    ]
    totals = planted.summary(outcomes)
    assert totals["wrong_frac"] <= 0.05
    assert totals["wrong_of_stops_frac"] <= 0.05
    assert totals["regret_frac"] < totals["simple_regret_frac"]
    clear = [o for o in outcomes if o.case.saving_frac == 0.2 and o.case.noise_log == 0.02]
    assert all(o.is_stop for o in clear)


@pytest.mark.parametrize("count", [2, 10, 50])
def test_the_best_of_equals_owes_its_lead_to_chance(count: int) -> None:
    """All predicted alike: the bias is the mean of the largest of ``count`` normal values."""
    equal = [layout(0.9) for _ in range(count)]
    grid = np.linspace(-8, 8, 20_001)
    density = count * stats.norm.pdf(grid) * stats.norm.cdf(grid) ** (count - 1)
    largest = float(integrate.trapezoid(grid * density, grid))
    assert selection_bias_log(equal[0], equal) == pytest.approx(SIGMA * largest, rel=0.12)


def test_a_layout_far_ahead_or_alone_owes_nothing_to_chance() -> None:
    best = layout(0.5)
    assert selection_bias_log(best, [best]) == 0.0
    others = [layout(0.9) for _ in range(50)]
    # 512 draws of an error that chance does not choose have a mean of SIGMA / sqrt(512).
    assert selection_bias_log(best, [best, *others]) < 4 * SIGMA / math.sqrt(512)


def test_errors_that_all_share_choose_nobody() -> None:
    shared = [
        replace(layout(0.9), ratio=Estimate(median=0.9, error_log={"gemm": SIGMA}))
        for _ in range(50)
    ]
    assert selection_bias_log(shared[0], shared) < 4 * SIGMA / math.sqrt(512)


@pytest.mark.parametrize(("steps", "coverage"), [(4, 1.0), (20, 0.5)])
def test_thin_evidence_is_never_acted_on(
    steady: Callable[..., Forecast], steps: int, coverage: float
) -> None:
    running, best = layout(1.0), layout(0.3)
    plan = Plan(
        running=running,
        measured_step_time_s=1.0,
        memory_capacity_nbytes=None,
        candidates=(best,),
    )
    forecast = replace(steady(), num_samples=steps)
    met = frozenset()
    for _ in range(3):
        decision = decide(
            Goals(restart_cost_s=1.0),
            forecast=forecast,
            plan=plan,
            coverage_frac=coverage,
            previously_met=met,
        )
        met = decision.rules_met
        assert decision.action is Action.ABSTAIN


def layout(ratio: float) -> Candidate:
    return planted.at_ratio(planted.base_layout(), ratio, SIGMA)
