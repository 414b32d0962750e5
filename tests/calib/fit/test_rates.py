"""Planted seconds of a launch, a FLOP and a byte come back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from forerun.calib.fit._rates import Form, Rates, fit_rates
from forerun.calib.fit.operator_kinds import Columns, WorkKind

COSTS = (WorkKind.LAUNCH, WorkKind.FLOP, WorkKind.BYTES)
UNITS_S = np.array([2e-6, 5e-15, 8e-13])
SIGMA = np.array([1.0, 0.5, 0.9])
PARTS = arrays(np.float64, (4, 3), elements=st.floats(1e-7, 1e-2))


def _columns(amounts: np.ndarray) -> Columns:
    return Columns(costs=COSTS, amounts=amounts)


def _amounts(number: int, *, seed: int = 0) -> np.ndarray:
    """Rows that launches, FLOP and bytes bound in turn."""
    rng = np.random.default_rng(seed)
    launches = rng.integers(1, 20, number).astype(np.float64)
    flop = np.exp(rng.uniform(np.log(1e7), np.log(1e12), number))
    nbytes = np.exp(rng.uniform(np.log(1e5), np.log(1e9), number))
    return np.column_stack([launches, flop, nbytes])


def _fit(amounts: np.ndarray, time_s: np.ndarray, **options) -> Rates:
    chosen = {
        "weight": np.ones(len(time_s)),
        "start": np.log(UNITS_S) + np.array([0.5, -0.3, 0.6]),
        "sigma": SIGMA,
        "form": Form.SUM,
        **options,
    }
    return fit_rates(_columns(amounts), np.log(time_s), **chosen)


def _sum_s(amounts: np.ndarray) -> np.ndarray:
    return amounts @ UNITS_S


def _noise(number: int) -> np.ndarray:
    return np.exp(0.02 * np.random.default_rng(1).normal(size=number))


@pytest.mark.parametrize("number", [40, 400])
def test_planted_units_come_back(number: int) -> None:
    amounts = _amounts(number)
    rates = _fit(amounts, _sum_s(amounts) * _noise(number))
    assert np.exp(rates.log_unit_s) == pytest.approx(UNITS_S, rel=0.05)
    assert np.exp(rates.log_power) == pytest.approx(1.0, abs=0.1)
    other = _amounts(50, seed=2)
    law = np.exp(rates.log_time(_columns(other)))
    assert law == pytest.approx(_sum_s(other), rel=0.04)


def test_parts_that_overlap_are_told_from_parts_in_sum() -> None:
    amounts = _amounts(150)
    rates = _fit(amounts, (amounts * UNITS_S).max(axis=1) * _noise(150))
    assert np.exp(rates.log_power) > 1.3
    law = np.exp(rates.log_time(_columns(amounts)))
    assert np.median(np.abs(law / (amounts * UNITS_S).max(axis=1) - 1)) < 0.03


def test_a_planted_chain_comes_back() -> None:
    """Work hides behind launches, all but its first fifth."""
    amounts, lead = _amounts(150), 0.2
    parts = amounts * UNITS_S
    work = parts[:, 1:].sum(axis=1)
    time_s = np.maximum(parts[:, 0] + lead * work, work)
    rates = _fit(amounts, time_s * _noise(150), form=Form.CHAIN)
    law = np.exp(rates.log_time(_columns(amounts)))
    assert np.median(np.abs(law / time_s - 1)) < 0.03
    assert 0.1 < rates.lead_frac < 0.3


@given(parts=PARTS, power=st.floats(0.0, 3.0))
def test_power_mean_lies_between_maximum_and_sum(parts: np.ndarray, power: float) -> None:
    def mean_s(log_power: float) -> np.ndarray:
        rates = Rates(log_unit_s=np.zeros(3), log_power=log_power, lead_frac=0.0)
        return np.exp(rates.log_time(_columns(parts)))

    assert mean_s(0.0) == pytest.approx(parts.sum(axis=1), rel=1e-12)
    assert mean_s(np.log(200.0)) == pytest.approx(parts.max(axis=1), rel=0.01)
    slack = 1 + 1e-12
    assert np.all(mean_s(power) <= slack * parts.sum(axis=1))
    assert np.all(slack * mean_s(power) >= parts.max(axis=1))
    assert np.all(slack * mean_s(power) >= mean_s(power + 0.5))


@given(parts=PARTS, log_power=st.floats(0.0, 2.0))
def test_shares_are_those_of_a_change_in_time(parts: np.ndarray, log_power: float) -> None:
    """The share of a column is how much of a change of its rate the time takes up."""
    rates = Rates(log_unit_s=np.zeros(3), log_power=log_power, lead_frac=0.0)
    shares = rates.shares(_columns(parts))
    assert shares.sum(axis=1) == pytest.approx(np.ones(4))
    step = 1e-6
    for column in range(3):
        moved = Rates(
            log_unit_s=step * np.eye(3)[column], log_power=log_power, lead_frac=0.0
        ).log_time(_columns(parts))
        slope = (moved - rates.log_time(_columns(parts))) / step
        assert slope == pytest.approx(shares[:, column], abs=1e-4)


def test_what_samples_do_not_show_stays_at_its_prior() -> None:
    amounts = _amounts(60)
    amounts[:, 1] = 0.0
    start = np.log(UNITS_S) + 0.4
    rates = _fit(amounts, _sum_s(amounts), start=start)
    assert rates.log_unit_s[1] == pytest.approx(start[1], abs=1e-4)
    assert rates.log_unit_s[[0, 2]] == pytest.approx(np.log(UNITS_S)[[0, 2]], abs=0.03)


def test_columns_in_proportion_share_what_only_their_sum_shows() -> None:
    """Two equal columns of equal doubt: both move by the same factor."""
    amounts = np.repeat(np.geomspace(1e6, 1e9, 40)[:, None], 3, axis=1)
    start = np.full(3, np.log(1e-12))
    time_s = 2 * amounts.sum(axis=1) * 1e-12
    rates = _fit(amounts, time_s, start=start, sigma=np.ones(3))
    assert rates.log_unit_s - start == pytest.approx(np.full(3, rates.log_unit_s[0] - start[0]))
    assert np.exp(rates.log_time(_columns(amounts))) == pytest.approx(time_s, rel=0.01)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_few_samples_leave_a_tight_prior_where_it_is(number: int) -> None:
    amounts = _amounts(number)
    start = np.log(UNITS_S) + 0.5
    rates = _fit(amounts, _sum_s(amounts), start=start, sigma=np.full(3, 1e-3))
    assert rates.log_unit_s == pytest.approx(start, abs=0.01)


def test_wild_samples_do_not_pull_the_rates() -> None:
    amounts = _amounts(100)
    time_s = _sum_s(amounts) * _noise(100)
    time_s[::10] *= 5.0
    rates = _fit(amounts, time_s)
    law = np.exp(rates.log_time(_columns(amounts)))
    assert np.median(law / _sum_s(amounts)) == pytest.approx(1.0, abs=0.03)


def test_samples_of_little_weight_hardly_count() -> None:
    amounts = np.tile(_amounts(50), (2, 1))
    time_s = _sum_s(amounts) * np.repeat([1.0, 1.5], 50)
    weight = np.repeat([1.0, 0.01], 50)
    law = np.exp(_fit(amounts, time_s, weight=weight).log_time(_columns(amounts[:50])))
    assert np.median(law / time_s[:50]) == pytest.approx(1.0, abs=0.03)
    law = np.exp(_fit(amounts, time_s, weight=weight[::-1]).log_time(_columns(amounts[:50])))
    assert np.median(law / time_s[:50]) == pytest.approx(1.5, abs=0.05)


def test_order_of_rows_changes_nothing() -> None:
    amounts = _amounts(300)
    time_s = _sum_s(amounts) * _noise(300)
    order = np.random.default_rng(3).permutation(300)
    first, second = _fit(amounts, time_s), _fit(amounts[order], time_s[order])
    assert np.array_equal(first.log_unit_s, second.log_unit_s)
    assert first.log_power == second.log_power


def test_planted_units_of_an_overlapped_law_come_back() -> None:
    """A launch, and after it the larger of FLOP and bytes, nearly."""
    amounts = _amounts(400)
    parts = amounts * UNITS_S
    time_s = parts[:, 0] + (parts[:, 1] ** 3 + parts[:, 2] ** 3) ** (1 / 3)
    rates = _fit(amounts, time_s * _noise(400), form=Form.OVERLAP)
    assert np.exp(rates.log_unit_s) == pytest.approx(UNITS_S, rel=0.1)
    assert np.exp(rates.log_power) == pytest.approx(3.0, rel=0.25)
    assert rates.shares(_columns(amounts)).sum(axis=1) == pytest.approx(np.ones(400))


@pytest.mark.parametrize("form", Form)
def test_no_unit_passes_its_floor(form: Form) -> None:
    """Rows of twice a sheet's FLOP rate leave the law at the sheet."""
    amounts = _amounts(400)
    least = np.array([-np.inf, np.log(2 * UNITS_S[1]), -np.inf])
    rates = _fit(amounts, _sum_s(amounts), form=form, least=least)
    assert rates.log_unit_s[1] >= least[1]
