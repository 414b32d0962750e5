"""Scores in closed form."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.benchmarks.protocols.scores import concat_scored, figures, noise_floors, score_rows


def scored(
    group: str, measured: list[float], predicted: list[float], half: float = 0.1
) -> pd.DataFrame:
    estimate = np.array(predicted)
    columns = {
        "protocol": "random",
        "group": group,
        "measured_s": measured,
        "predicted_s": estimate,
        "low_s": estimate * (1 - half),
        "high_s": estimate * (1 + half),
    }
    return pd.DataFrame(columns)


def test_figures_are_relative_to_what_was_measured() -> None:
    result = figures(scored("g", [1.0, 1.0, 1.0, 1.0], [1.05, 0.95, 1.2, 0.9]))
    assert result["mape_frac"] == pytest.approx((0.05 + 0.05 + 0.2 + 0.1) / 4)
    assert result["median_ape_frac"] == pytest.approx(0.075)
    assert result["bias_frac"] == pytest.approx(0.025)
    assert result["coverage_90_frac"] == 0.5
    assert result["interval_width_frac"] == pytest.approx(0.1)


def test_all_weighs_groups_not_rows() -> None:
    rows = score_rows(
        concat_scored([scored("few", [1.0], [1.4]), scored("many", [1.0] * 9, [1.0] * 9)]), "t"
    )
    assert [(r["group"], r["n"]) for r in rows] == [("all", 10), ("few", 1), ("many", 9)]
    assert rows[0]["mape_frac"] == pytest.approx(0.2)
    assert set(rows[0]) == {
        *("table", "protocol", "group", "n", "mape_frac", "median_ape_frac"),
        *("p90_ape_frac", "bias_frac", "coverage_90_frac", "interval_width_frac"),
    }


@given(cut=st.integers(1, 4), values=st.lists(st.floats(0.1, 10), min_size=5, max_size=5))
def test_parts_of_a_group_score_as_the_whole(cut: int, values: list[float]) -> None:
    ones = [1.0] * 5
    parts = [scored("g", ones[:cut], values[:cut]), scored("g", ones[cut:], values[cut:])]
    assert figures(concat_scored(parts)) == figures(scored("g", ones, values))


def test_the_noise_floor_is_what_repeats_differ_by() -> None:
    frame = pd.DataFrame(
        {
            "device": "d",
            "group": "g",
            "phase": "forward",
            "shape": ["1x1", "1x1", "1x1", "2x2", "3x3", "3x3"],
            "element_nbytes": 2,
            "time_s": [1.0, 1.0, 1.3, 5.0, 2.0, 9.0],
            "flag": ["", "", "", "", "", "outlier"],
        }
    )
    ((group, mean_frac, median_frac),) = noise_floors(frame).itertuples(name=None)
    assert group == "g/forward" and mean_frac == pytest.approx(0.1) and median_frac == 0
    assert noise_floors(frame.drop_duplicates("shape")).empty
