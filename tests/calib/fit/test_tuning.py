"""The search for the scales of the process, on tables that nobody would choose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.fit._rates import Form, Rates, fit_rates
from forerun.calib.fit.operator_kinds import Columns, WorkKind
from forerun.calib.network.curves import Law, fit_law
from forerun.calib.regressors.gaussian import (
    NUM_SCALES,
    START,
    Inputs,
    ScalePosterior,
    fit_gaussian,
    lower_factor,
)
from forerun.calib.regressors.robust import first_minimum, on_grid

COSTS = (WorkKind.LAUNCH, WorkKind.FLOP, WorkKind.BYTES)
Table = tuple[Inputs, np.ndarray, np.ndarray]


@st.composite
def tables(draw: Any) -> Table:
    """3 to 24 rows: drawn, repeated, all alike, or on a line; of one or two members; any scale."""
    number = draw(st.integers(3, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    points = rng.uniform(-3, 3, (number, draw(st.integers(0, 3))))
    points = points[rng.integers(0, draw(st.integers(1, number)), number)]
    points *= draw(st.sampled_from([1e-6, 1.0, 1e3]))
    values = draw(st.sampled_from([0.0, 0.3])) * points.sum(axis=1)
    values = values + draw(st.sampled_from([0.0, 1e-9, 0.03])) * rng.normal(size=number)
    values = draw(st.sampled_from([1e-8, 1.0, 1e6])) * (values + draw(st.sampled_from([0.0, 5.0])))
    weight = rng.uniform(draw(st.sampled_from([1e-4, 1.0])), 1.0, number)
    member = rng.integers(0, draw(st.integers(1, 2)), number)
    trend = points if draw(st.booleans()) else np.zeros((number, 0))
    return Inputs(coordinates=points, trend=trend, member=member), values, weight


@pytest.mark.slow
@given(table=tables())
@settings(max_examples=40)
def test_every_table_gives_a_finite_process(table: Table) -> None:
    """Warnings are errors: nothing overflows and nothing is divided by zero on the way."""
    inputs, values, weight = table
    fitted = fit_gaussian(inputs, values, weight)
    assert np.all(np.isfinite(fitted.theta))
    assert np.all(np.abs(fitted.theta - START) < 30)
    mean, sigma = fitted.predict(inputs)
    for result in (mean, sigma, fitted.held_out_residuals, fitted.held_out_sigma):
        assert np.all(np.isfinite(result))
    assert np.all(sigma > 0)
    assert np.abs(mean).max() <= 2 * np.abs(values).max() + 1e-9


@given(table=tables(), seed=st.integers(0, 2**31))
@settings(max_examples=60)
def test_the_gradient_is_that_of_differences(table: Table, seed: int) -> None:
    inputs, values, weight = table
    scale = max(float(np.abs(values).max()), 1e-3)
    points = inputs.coordinates / max(float(np.abs(inputs.coordinates).max(initial=0)) / 3, 1e-9)
    trend = points if inputs.trend.shape[1] else inputs.trend
    usual = Inputs(coordinates=points, trend=trend, member=inputs.member)
    scale_posterior = ScalePosterior.of(usual, values / scale, np.maximum(weight, 0.1))
    theta = START + np.random.default_rng(seed).uniform(-0.5, 0.5, NUM_SCALES)
    step = 1e-4
    moved = [
        (
            scale_posterior.cost(theta + step * unit)[0]
            - scale_posterior.cost(theta - step * unit)[0]
        )
        / (2 * step)
        for unit in np.eye(NUM_SCALES)
    ]
    value, slopes = scale_posterior.cost(theta)
    assert slopes == pytest.approx(moved, rel=1e-5, abs=1e-6 * (1 + abs(value)))


@given(table=tables())
@settings(max_examples=15)
def test_no_start_finds_anything_better(table: Table) -> None:
    inputs, values, weight = table
    scale_posterior = ScalePosterior.of(inputs, values, weight)
    best = scale_posterior.cost(scale_posterior.maximize())[0]
    assert best <= scale_posterior.cost(START)[0] + 1e-3 + 1e-6 * abs(best)


def test_a_singular_covariance_has_a_factor() -> None:
    for size in (1e-12, 1.0, 1e12):
        matrix = np.full((50, 50), size)
        factor = lower_factor(matrix)
        assert factor @ factor.T == pytest.approx(matrix, rel=1e-6)


@pytest.mark.parametrize("form", Form)
def test_slopes_of_the_law_are_those_of_differences(form: Form) -> None:
    rng = np.random.default_rng(0)
    done = Columns(costs=COSTS, amounts=np.exp(rng.uniform(0, 3, (9, 3))) * [1.0, 1e9, 1e6])
    units = np.log([1e-5, 1e-14, 1e-11])
    lead = 0.2 if form is Form.CHAIN else 0.0
    kind = {"lead_frac": lead, "is_overlapped": form is Form.OVERLAP}
    rates = {
        sign: [
            Rates(
                log_unit_s=units + sign * 1e-6 * unit,
                log_power=0.4,
                **kind,
            ).log_time(done)
            for unit in np.eye(3)
        ]
        for sign in (-1, 1)
    }
    moved = (np.array(rates[1]) - np.array(rates[-1])).T / 2e-6
    slopes = Rates(log_unit_s=units, log_power=0.4, **kind).slopes(done)
    assert slopes == pytest.approx(moved, abs=1e-7)
    assert slopes.sum(axis=1) == pytest.approx(np.ones(9))


@given(
    seed=st.integers(0, 2**31),
    number=st.integers(1, 24),
    unit=st.sampled_from([1e-6, 1.0, 1e6]),
    form=st.sampled_from(Form),
    noise=st.sampled_from([0.0, 0.02, 3.0]),
)
@settings(max_examples=40)
def test_rates_do_not_depend_on_the_unit_of_time(
    seed: int, number: int, unit: float, form: Form, noise: float
) -> None:
    """Times in another unit, with priors in that unit, give the same law in that unit."""
    rng = np.random.default_rng(seed)
    amounts = np.exp(rng.uniform(0, 6, (number, 3))) * [1.0, 1e9, 1e6]
    amounts = amounts[rng.integers(0, number, number)]
    start = np.log([1e-5, 1e-14, 1e-11])
    log_time = np.log(amounts @ np.exp(start)) + noise * rng.normal(size=number)
    done = Columns(costs=COSTS, amounts=amounts)

    def law(unit: float) -> np.ndarray:
        fitted = fit_rates(
            done,
            log_time + np.log(unit),
            np.ones(number),
            start=start + np.log(unit),
            sigma=np.array([1.0, 0.3, 0.9]),
            form=form,
        )
        return fitted.log_time(done) - np.log(unit)

    assert law(unit) == pytest.approx(law(1.0), abs=2e-4)


@given(
    seed=st.integers(0, 2**31),
    number=st.integers(1, 24),
    size=st.sampled_from([1e-9, 1.0, 1e9]),
    sigma_log=st.sampled_from([0.1, 1.0, 1e3]),
)
def test_curves_of_any_size_have_finite_constants(
    seed: int, number: int, size: float, sigma_log: float
) -> None:
    rng = np.random.default_rng(seed)
    nbytes = 2.0 ** rng.integers(0, 40, number)
    log_time = np.log(size) + rng.normal(size=number)
    prior = Law(fixed_s=1e-5, byte_s=1e-10)
    law = fit_law(np.ones(number), nbytes, log_time, np.ones(number), prior, sigma_log=sigma_log)
    assert 0 < law.fixed_s < np.inf
    assert 0 < law.byte_s < np.inf


def test_last_digits_choose_nothing() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        scores = np.repeat(rng.uniform(0.1, 9.0, 3), 2) * (1 + 1e-14 * rng.normal(size=6))
        assert first_minimum(scores) == 2 * int(np.argmin(scores[::2].round(9)))
    values = on_grid(rng.normal(size=4000))
    assert values.sum() == values[::-1].sum() == values[np.argsort(values)].sum()
