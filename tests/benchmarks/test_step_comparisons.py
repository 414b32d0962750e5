"""A paired bootstrap finds the difference that was planted, and none where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
from step_fixtures import layout, row

from forerun.benchmarks.protocols.scores import Fold, score_folds
from forerun.benchmarks.scoring.step_comparisons import compare
from forerun.calib.records.step_rows import StepPredictions, StepRow


@dataclass(frozen=True)
class FixedModel:
    """A model that says what it is told."""

    predictions: StepPredictions

    def fit(self, rows: Sequence[StepRow]) -> FixedModel:
        del rows
        return self

    def predict(self, rows: Sequence[StepRow]) -> StepPredictions:
        del rows
        return self.predictions


def rows_of(num_series: int, num_rows: int) -> list[StepRow]:
    return [
        replace(row(layout(1, 1, 8, 1), 1.0, f"{one}-{place}"), machine=f"m{one}")
        for one in range(num_series)
        for place in range(num_rows)
    ]


def scores_with_errors(
    rows: Sequence[StepRow], errors: Sequence[float], draw: int = 0
) -> pd.DataFrame:
    times = 1.0 + np.asarray(errors, dtype=np.float64)
    predictions = StepPredictions(time_s=times, low_s=0.9 * times, high_s=1.1 * times)
    every = tuple(range(len(rows)))
    fold = Fold("p", "m", draw, positions=every, train=())
    return score_folds(rows, [fold], FixedModel(predictions).fit)[0]


def test_a_planted_difference_is_found_with_its_interval() -> None:
    # Series differ by N(-0.02, 0.01): the mean of 40 lies within 1.645 x 0.01 / sqrt(40) of that.
    rng = np.random.default_rng(1)
    rows = rows_of(40, 5)
    theirs = rng.choice((-1, 1), 200) * rng.uniform(0.08, 0.2, 200)
    planted = np.repeat(rng.normal(-0.02, 0.01, 40), 5)
    ours = np.abs(theirs) + planted
    comparison = compare([scores_with_errors(rows, ours)], [scores_with_errors(rows, theirs)])
    assert comparison is not None and comparison.is_better and comparison.are_series
    assert (comparison.num_rows, comparison.num_units) == (200, 40)
    assert comparison.difference_frac == pytest.approx(planted.mean())
    half = 1.645 * planted[::5].std() / np.sqrt(40)
    assert comparison.high_frac - planted.mean() == pytest.approx(half, rel=0.1)
    assert planted.mean() - comparison.low_frac == pytest.approx(half, rel=0.1)
    repeated = compare([scores_with_errors(rows, ours)], [scores_with_errors(rows, theirs)])
    assert repeated == comparison
    swapped = compare([scores_with_errors(rows, theirs)], [scores_with_errors(rows, ours)])
    assert swapped is not None and not swapped.is_better
    assert swapped.difference_frac == pytest.approx(-comparison.difference_frac)


def test_rows_that_move_together_tell_less_than_as_many_series() -> None:
    # One series of five is worse by far: its rows are one piece of evidence, not twenty.
    planted = np.repeat([-0.01, -0.01, -0.01, -0.01, 0.03], 20)
    rows = rows_of(5, 20)
    comparison = compare(
        [scores_with_errors(rows, 0.1 + planted)], [scores_with_errors(rows, np.full(100, 0.1))]
    )
    assert comparison is not None and comparison.difference_frac == pytest.approx(-0.002)
    assert not comparison.is_better and comparison.low_frac == pytest.approx(-0.01)
    alone = compare(
        [scores_with_errors(rows[:20], 0.1 + planted[:20])],
        [scores_with_errors(rows[:20], np.full(20, 0.1))],
    )
    assert alone is not None and not alone.are_series and alone.num_units == 20
    assert alone.is_better


def test_each_row_counts_once_however_often_it_was_drawn() -> None:
    rows = rows_of(1, 2)
    ours = [scores_with_errors(rows[:1], [0.0], draw) for draw in range(9)] + [
        scores_with_errors(rows[1:], [0.3])
    ]
    theirs = [scores_with_errors(rows[:1], [0.1], draw) for draw in range(9)] + [
        scores_with_errors(rows[1:], [0.1])
    ]
    comparison = compare(ours, theirs)
    assert comparison is not None and comparison.difference_frac == pytest.approx(0.05)
    assert comparison.num_rows == 2


def test_what_one_of_them_does_not_say_is_not_compared() -> None:
    rows = rows_of(1, 2)
    assert (
        compare([scores_with_errors(rows, [np.nan] * 2)], [scores_with_errors(rows, [0.1] * 2)])
        is None
    )
    with pytest.raises(ValueError, match="one fold"):
        compare([scores_with_errors(rows[:1], [0.1])], [scores_with_errors(rows[1:], [0.1])])
