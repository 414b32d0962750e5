from __future__ import annotations

import numpy as np
import pytest

from forerun.calib.answers.run_measurements import overhead
from forerun.calib.errors import CalibrationError


def test_a_planted_overhead_comes_back_through_a_trend() -> None:
    """Steps that slow down by 20 % over the window, hooks that add 3 %."""
    hooked = np.arange(40) % 2 == 1
    times = np.linspace(1.0, 1.2, 40) * (1 + 0.03 * hooked)
    result = overhead(times, hooked)
    assert result.overhead_frac == pytest.approx(0.03, abs=0.001)
    assert result.low_frac <= result.overhead_frac <= result.high_frac
    assert (result.num_hooked, result.num_bare) == (20, 20)


def test_the_interval_covers_the_planted_overhead() -> None:
    random = np.random.default_rng(11)
    hooked = np.arange(20) % 2 == 1
    hits = 0
    for _ in range(300):
        times = 1 + 0.02 * random.standard_normal(20) + 0.01 * hooked
        result = overhead(times, hooked)
        hits += result.low_frac <= 0.01 <= result.high_frac
    # 0.90 +- 3 standard errors of 300 draws.
    assert 0.84 <= hits / 300 <= 0.97


def test_the_same_steps_give_the_same_answer() -> None:
    times, hooked = np.array([1.0, 1.1, 1.02, 1.3, 0.9, 1.2]), np.array([0, 1, 0, 1, 0, 1])
    assert overhead(times, hooked) == overhead(times, hooked)


def test_too_few_steps_are_named() -> None:
    with pytest.raises(CalibrationError, match="1 hooked and 2 bare steps are too few"):
        overhead([1.0, 1.0, 1.0], [True, False, False])
