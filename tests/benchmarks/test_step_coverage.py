"""Verdicts on coverage against closed forms."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom
from step_fixtures import layout, row

from forerun.benchmarks.scoring.step_coverage import coverage_verdict, pooled, row_coverage


def shares(num_covered: int, count: int) -> list[float]:
    return [1.0] * num_covered + [0.0] * (count - num_covered)


@pytest.mark.parametrize(
    ("num_covered", "count", "is_met"),
    [(17, 20, True), (19, 20, True), (20, 20, False), (16, 20, False), (95, 100, True)],
)
def test_many_rows_are_held_to_limits(num_covered: int, count: int, is_met: bool) -> None:
    result = coverage_verdict(shares(num_covered, count))
    assert result is not None and result.is_met is is_met
    assert (result.low_frac, result.high_frac, result.num_rows) == (0.85, 0.95, count)


def test_few_rows_are_held_to_what_they_can_tell() -> None:
    # All of n held: the lower end is 0.05 ** (1 / n); none held: the upper one is 1 less that.
    for count in (1, 7, 19):
        result = coverage_verdict(shares(count, count))
        assert result is not None and result.is_met
        assert result.low_frac == pytest.approx(0.05 ** (1 / count)) and result.high_frac == 1
        missed = coverage_verdict(shares(0, count))
        assert missed is not None and missed.low_frac == 0
        assert missed.high_frac == pytest.approx(1 - 0.05 ** (1 / count))
        assert missed.is_met == (count == 1)
    # Elsewhere the tails of the binomial at either end are 5 %.
    result = coverage_verdict(shares(7, 10))
    assert result is not None and result.is_met
    assert binom.sf(6, 10, result.low_frac) == pytest.approx(0.05)
    assert binom.cdf(7, 10, result.high_frac) == pytest.approx(0.05)
    below = coverage_verdict(shares(6, 10))
    assert below is not None and not below.is_met
    assert coverage_verdict([]) is None


def test_a_row_counts_once_in_draws_and_in_lines() -> None:
    rows = [row(layout(1, 1, 8, 1), 1.0, name) for name in "ab"]

    def score_rows(covered: list[bool], draw: int) -> pd.DataFrame:
        columns = {
            "draw": draw,
            "row": rows[: len(covered)],
            "measured_s": 1.0,
            "predicted_s": 1.1,
            "low_s": np.where(covered, 0.9, 1.05),
            "high_s": 1.2,
        }
        return pd.DataFrame(columns)

    one = row_coverage(
        [score_rows([True, False], 0), score_rows([True], 1), score_rows([False], 2)]
    )
    assert one == {("m", "a"): pytest.approx(2 / 3), ("m", "b"): 0.0}
    other = row_coverage([score_rows([False], 0)])
    assert pooled([one, other]) == {("m", "a"): pytest.approx(1 / 3), ("m", "b"): 0.0}
