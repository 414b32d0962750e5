"""Intervals of a difference hold as often as they say, whatever moves steps, windows and runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_runs import planted_windows

from forerun.calib.differences.levels import FALSE_ALARM, Level, compare_levels, log_level

REPEAT_SIGMA_LOG = 0.015
PAIRS = 400
# Noise that moves windows moves runs as well, as intervals assume.
NOISES: dict[str, dict[str, Any]] = {
    "quiet": {"sigma_log": 0.02, "run_log": REPEAT_SIGMA_LOG},
    "related steps": {"sigma_log": 0.03, "related": 0.6, "run_log": REPEAT_SIGMA_LOG},
    "shared machine": {"sigma_log": 0.1, "wander_log": 0.2, "run_log": 0.2, "num_windows": 5},
    "one window": {
        "sigma_log": 0.03, "num_windows": 1, "num_steps": 20, "run_log": REPEAT_SIGMA_LOG,
    },
    "one window, related": {
        "sigma_log": 0.03, "related": 0.5, "num_windows": 1, "num_steps": 20,
        "run_log": REPEAT_SIGMA_LOG,
    },
}  # fmt: skip
LEVELS = st.builds(
    lambda values, repeat_sigma, noise: Level(
        values=tuple(values), repeat_sigma=repeat_sigma, noise=noise
    ),
    st.lists(st.floats(-3, 3), min_size=1, max_size=6),
    st.floats(0.001, 0.2),
    st.floats(0.0, 0.5),
)


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("planted", [0.0, 0.3])
def test_nine_of_ten_intervals_hold_and_nothing_is_claimed_of_noise(
    name: str, planted: float
) -> None:
    draw = np.random.default_rng(1)
    num_covered = claimed = 0
    for _ in range(PAIRS):
        first, second = (
            log_level(
                planted_windows(draw, **NOISES[name], level_log=level),
                repeat_sigma_log=REPEAT_SIGMA_LOG,
            )
            for level in (0.0, planted)
        )
        result = compare_levels(first, second)
        num_covered += result.low <= planted <= result.high
        claimed += result.is_shown
    assert num_covered >= 0.86 * PAIRS
    if not planted:
        # Three standard deviations above what is said.
        most = FALSE_ALARM + 3 * math.sqrt(FALSE_ALARM / PAIRS)
        assert claimed <= most * PAIRS
    elif name != "shared machine":
        assert claimed == PAIRS


@given(LEVELS, LEVELS)
def test_the_other_way_round_is_the_same_with_another_sign(first: Level, second: Level) -> None:
    result, back = compare_levels(first, second), compare_levels(second, first)
    assert back.value == pytest.approx(-result.value, abs=1e-12)
    assert back.low == pytest.approx(-result.high, rel=1e-9, abs=1e-12)
    assert back.least == pytest.approx(result.least, rel=1e-9)
    assert back.chance == pytest.approx(result.chance, rel=1e-6, abs=1e-12)


@given(LEVELS)
def test_a_level_does_not_differ_from_itself(level: Level) -> None:
    result = compare_levels(level, level)
    assert result.value == 0 and not result.is_shown and result.chance == 1.0
    assert result.low <= 0 <= result.high


@given(LEVELS, LEVELS, st.integers(2, 50))
def test_more_comparisons_claim_less(first: Level, second: Level, number: int) -> None:
    one, many = compare_levels(first, second), compare_levels(first, second, num_compared=number)
    assert many.least >= one.least and many.chance >= one.chance
    assert (many.low, many.high) == (one.low, one.high)


@given(LEVELS, LEVELS)
def test_what_is_claimed_lies_beyond_its_interval(first: Level, second: Level) -> None:
    result = compare_levels(first, second)
    if result.is_shown:
        assert result.low * result.high > 0 and result.chance <= FALSE_ALARM


def test_more_windows_show_less_where_the_machine_is_steady() -> None:
    draw = np.random.default_rng(3)

    def least(number: int) -> float:
        level = log_level(
            planted_windows(draw, num_windows=number, sigma_log=0.3), repeat_sigma_log=0.01
        )
        return compare_levels(level, level).least

    assert np.median([least(32) for _ in range(20)]) < np.median([least(4) for _ in range(20)])
