"""An estimate against scipy's log-normal law, and ratios against draws of correlated errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from forerun.calib.regressors.estimate import Estimate

DRAWS = 200_000
SIGMAS = st.floats(0.001, 2.0)
UNKNOWNS = st.dictionaries(st.sampled_from("abc"), st.floats(-0.5, 0.5), max_size=3)


@given(st.floats(1e-6, 1e6), SIGMAS, st.floats(-3.0, 3.0))
def test_interval_and_probability_are_those_of_the_law(
    median: float, sigma: float, deviations: float
) -> None:
    one = Estimate(median=median, error_log={"a": 0.6 * sigma}, unshared_sigma_log=0.8 * sigma)
    truth = stats.lognorm(sigma, scale=median)
    assert one.sigma_log == pytest.approx(sigma)
    assert (one.low, one.high) == pytest.approx(truth.interval(0.9))
    value = median * np.exp(deviations * sigma)
    assert one.below(value) == pytest.approx(truth.cdf(value))


def test_a_certain_quantity_has_no_interval() -> None:
    one = Estimate(median=2.0)
    assert one.low == one.median == one.high
    assert [one.below(value) for value in (1.9, 2.0, 2.1)] == [0.0, 0.0, 1.0]


@settings(max_examples=20)
@given(UNKNOWNS, UNKNOWNS, SIGMAS, SIGMAS, st.floats(0.0, 0.99))
def test_a_ratio_has_what_two_draws_leave(
    ours: dict[str, float], theirs: dict[str, float], our: float, their: float, alike: float
) -> None:
    """The same unknown moves both; the rest is drawn with the stated correlation."""
    one = Estimate(median=3.0, error_log=ours, unshared_sigma_log=our)
    other = Estimate(median=2.0, error_log=theirs, unshared_sigma_log=their)
    ratio = one.ratio_to(other, alike=alike)
    random = np.random.default_rng(7)
    unknown = dict(zip("abc", random.standard_normal((3, DRAWS)), strict=True))
    own = random.multivariate_normal([0, 0], [[1, alike], [alike, 1]], DRAWS).T
    logs = [
        np.log(each.median) + each.unshared_sigma_log * rest
        + sum(error * unknown[name] for name, error in each.error_log.items())
        for each, rest in ((one, own[0]), (other, own[1]))
    ]  # fmt: skip
    drawn = logs[0] - logs[1]
    assert ratio.median == 1.5
    assert ratio.sigma_log == pytest.approx(drawn.std(), rel=0.01)
    inside = (np.log(ratio.low) < drawn) & (drawn < np.log(ratio.high))
    assert inside.mean() == pytest.approx(0.9, abs=0.005)


@given(UNKNOWNS, SIGMAS)
def test_over_itself_nothing_is_open(errors: dict[str, float], sigma: float) -> None:
    one = Estimate(median=3.0, error_log=errors, unshared_sigma_log=sigma)
    same = one.ratio_to(one, alike=1.0)
    assert (same.median, same.sigma_log) == (1.0, 0.0)
