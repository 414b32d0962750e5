"""The interval of the next step: coverage on planted series, also where they drift."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.forecast.adaptive import NUM_FIRST, AdaptiveInterval


def coverage(times_s: np.ndarray) -> float:
    known, covered = AdaptiveInterval(), []
    for time_s in times_s.tolist():
        expected = known.interval()
        if expected is not None:
            covered.append(expected[0] <= time_s <= expected[1])
        known.add(time_s)
    return float(np.mean(covered))


def series(kind: str, number: int, random: np.random.Generator) -> np.ndarray:
    noise = 0.04 * random.standard_normal(number)
    if kind == "wandering":
        noise += 0.01 * np.cumsum(random.standard_normal(number))
    elif kind == "slowing":
        noise += np.linspace(0.0, 0.5, number)
    elif kind == "jumping":
        noise += 0.15 * (np.arange(number) // 150 % 2)
    elif kind == "outliers":
        noise += np.where(random.random(number) < 0.08, random.exponential(0.4, number), 0.0)
    return 0.2 * np.exp(noise)


@pytest.mark.parametrize("kind", ["steady", "wandering", "slowing", "jumping", "outliers"])
def test_nine_of_ten_steps_lie_inside_whatever_the_level_does(kind: str) -> None:
    random = np.random.default_rng(11)
    value = np.mean([coverage(series(kind, 600, random)) for _ in range(4)])
    assert 0.85 <= value <= 0.95


def test_it_says_nothing_of_too_few_steps() -> None:
    known = AdaptiveInterval()
    for _ in range(NUM_FIRST - 1):
        known.add(1.0)
    assert known.interval() is None
    known.add(1.0)
    assert known.interval() is not None


@given(
    times_s=st.lists(
        st.floats(allow_nan=True, allow_infinity=True), min_size=NUM_FIRST, max_size=150
    )
)
def test_no_series_breaks_it(times_s: list[float]) -> None:
    known = AdaptiveInterval()
    for time_s in times_s:
        known.add(time_s)
    expected = known.interval()
    if expected is not None:
        assert 0.0 <= expected[0] <= expected[1]
