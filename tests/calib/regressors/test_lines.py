"""A ridge line through the larger half of samples."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.calib.regressors.trees import fit_line


def test_planted_slopes_of_the_larger_half_are_found() -> None:
    rng = np.random.default_rng(0)
    features = rng.uniform(0.0, 10.0, (4000, 3))
    bent = np.where(features[:, 0] > 5.0, 0.3 * features[:, 0] - 0.1 * features[:, 1], 7.0)
    line = fit_line(features, bent + 0.05 * rng.normal(size=len(bent)))
    queries = np.array([[9.0, 2.0, 5.0], [7.0, 8.0, 1.0]])
    assert line.predict(queries) == pytest.approx([2.5, 1.3], abs=0.05)


def test_beyond_the_samples_it_stays_where_they_end() -> None:
    features = np.column_stack([np.linspace(0.0, 1.0, 200), np.ones(200)])
    line = fit_line(features, features[:, 0])
    ends = line.predict(np.array([[1.0, 1.0], [9.0, 5.0]]))
    assert ends[0] == ends[1]
    octaves = line.octaves_beyond(np.array([[0.5, 1.0], [1.0 + np.log(4.0), 1.0]]))
    assert octaves == pytest.approx([0.0, 2.0])


def test_few_samples_say_little_of_a_slope() -> None:
    features = np.column_stack([np.arange(6.0)])
    line = fit_line(features, np.arange(6.0))
    rise = line.predict(np.array([[5.0]])) - line.predict(np.array([[3.0]]))
    assert 0.0 < rise < 0.5
