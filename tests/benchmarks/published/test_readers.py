"""Every family is known by its columns alone, and whatever it holds is valid in our own format."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest

from forerun.benchmarks.published.readers import read_published
from forerun.calib.errors import ConfigError
from forerun.calib.importers.canonical_tables import read_table

pytestmark = pytest.mark.nightly


def test_the_order_of_columns_does_not_matter(frame: pd.DataFrame, table: pd.DataFrame) -> None:
    other = read_published(frame[frame.columns[::-1]], "b.csv")
    pd.testing.assert_frame_equal(table.drop(columns="flag"), other.drop(columns="flag"))


def test_a_canonical_table_comes_back_from_our_own_format(table: pd.DataFrame) -> None:
    """Flagged rows too, every time to the last digit."""
    reread = read_table(pd.read_csv(io.StringIO(table.to_csv(index=False))), "own.csv")
    # Before pandas 3 the last bit of a number from a file may be another.
    pd.testing.assert_frame_equal(reread, table, check_dtype=False, rtol=1e-15)


def test_every_table_has_usable_rows_and_positive_times(table: pd.DataFrame) -> None:
    usable = table[table["flag"] == ""]
    assert len(usable) and (usable["time_s"] > 0).all() and (usable["time_s"] < 10).all()


def test_an_optional_column_without_values_changes_nothing(
    frame: pd.DataFrame, table: pd.DataFrame
) -> None:
    blank = frame.assign(flag=np.nan)
    if "flag" in frame.columns and frame["flag"].notna().any():
        pytest.skip("its flags are told by values")
    pd.testing.assert_frame_equal(table, read_published(blank, "a"))


def test_a_flag_on_a_published_row_reaches_all_its_samples(frame: pd.DataFrame) -> None:
    rows = read_published(frame.assign(flag="copied"), "a")
    assert rows["flag"].str.contains("copied").all()


def test_unknown_columns_are_told_with_the_nearest_family() -> None:
    frame = pd.DataFrame({"gpu": ["A"], "op": ["mm"], "batch": [1], "m": [2], "n": [3], "k": [4]})
    with pytest.raises(ConfigError) as caught:
        read_published(frame.assign(time_usec=5.0), "mine.csv")
    text = str(caught.value)
    assert "mine.csv" in text and "NeuSight GEMM" in text and "time_usec" in text
    assert "\n" not in text
