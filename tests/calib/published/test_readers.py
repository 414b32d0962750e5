"""Every family is known by its columns alone, and whatever it holds is valid in our own format."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.errors import CalibrationError, ConfigError
from forerun.calib.fit.operator_kinds import KINDS
from forerun.calib.importers.own_format import COLLECTIVE_COLUMNS, OPERATOR_COLUMNS, operator_table
from forerun.calib.published.readers import PublishedTable, read_published
from forerun.calib.workload.operators import OperatorKind


def rows_of(table: PublishedTable) -> pd.DataFrame:
    rows = table.operators if table.operators is not None else table.collectives
    assert rows is not None
    return rows


def test_the_order_of_columns_does_not_matter(frame: pd.DataFrame, table: PublishedTable) -> None:
    other = read_published(frame[frame.columns[::-1]], "b.csv")
    assert table.family == other.family
    pd.testing.assert_frame_equal(
        rows_of(table).drop(columns="flag"), rows_of(other).drop(columns="flag")
    )


def test_a_canonical_table_is_valid_in_our_own_format(table: PublishedTable) -> None:
    rows = rows_of(table)
    usable = rows[rows["flag"] == ""].reset_index(drop=True)
    written = io.StringIO(usable.to_csv(index=False))
    again = read_published(pd.read_csv(written), "own.csv")
    assert again.family == "own"
    pd.testing.assert_frame_equal(rows_of(again), usable, check_dtype=False)


def test_every_table_has_usable_rows_and_positive_times(table: PublishedTable) -> None:
    rows = rows_of(table)
    usable = rows[rows["flag"] == ""]
    assert len(usable) and (usable["time_s"] > 0).all() and (usable["time_s"] < 10).all()


def test_an_optional_column_without_values_changes_nothing(
    frame: pd.DataFrame, table: PublishedTable
) -> None:
    blank = frame.assign(flag=np.nan)
    if "flag" in frame.columns and frame["flag"].notna().any():
        pytest.skip("its flags are told by values")
    pd.testing.assert_frame_equal(rows_of(table), rows_of(read_published(blank, "a")))


def test_a_flag_on_a_published_row_reaches_all_its_samples(frame: pd.DataFrame) -> None:
    rows = rows_of(read_published(frame.assign(flag="copied"), "a"))
    assert rows["flag"].str.contains("copied").all()


def test_unknown_columns_are_told_with_the_nearest_family() -> None:
    frame = pd.DataFrame({"gpu": ["A"], "op": ["mm"], "batch": [1], "m": [2], "n": [3], "k": [4]})
    with pytest.raises(ConfigError) as caught:
        read_published(frame.assign(time_usec=5.0), "mine.csv")
    text = str(caught.value)
    assert "mine.csv" in text and "NeuSight GEMM" in text and "time_usec" in text
    assert "\n" not in text


@pytest.mark.parametrize("columns", [OPERATOR_COLUMNS, COLLECTIVE_COLUMNS])
def test_an_empty_table_is_no_data(columns: tuple[str, ...]) -> None:
    with pytest.raises(CalibrationError, match="no rows"):
        read_published(pd.DataFrame(columns=list(columns)), "empty.csv")


def own_row(**changed: object) -> pd.DataFrame:
    row = {
        "device": "A100",
        "group": "linear1",
        "kind": "linear",
        "phase": "forward",
        "shape": "8x16x32",
        "element_nbytes": 2,
        "time_s": 1e-4,
    }
    return pd.DataFrame([row, row | changed])


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"kind": "matmul"}, "'matmul' is none of"),
        ({"phase": "fwd"}, "'fwd' is none of"),
        ({"shape": "8x16"}, "has 2 sizes; linear has 3"),
        ({"shape": "8x0x4"}, "whole numbers above 0"),
        ({"time_s": 0.0}, "seconds above 0"),
        ({"time_s": "fast"}, "seconds above 0"),
        ({"element_nbytes": 1.5}, "whole number"),
        ({"device": ""}, "must not be empty"),
        ({"kind": "logits"}, "a group is one operator"),
    ],
)
def test_a_bad_row_is_named_with_rule_and_remedy(changed: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError, match=r"own.csv line 3: ") as caught:
        operator_table(own_row(**changed), "own.csv")
    assert part in str(caught.value)


def test_every_measurable_kind_has_a_number_of_sizes() -> None:
    host = {OperatorKind.HOST_MICROBATCH, OperatorKind.HOST_STEP}
    assert {kind for kind, law in KINDS.items() if law.num_sizes} == set(OperatorKind) - host


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 2**40), min_size=3, max_size=3),
    time_s=st.floats(1e-9, 1e3),
    flag=st.sampled_from(["", "outlier"]),
)
def test_a_row_of_our_own_format_survives(sizes: list[int], time_s: float, flag: str) -> None:
    shape = "x".join(map(str, sizes))
    frame = own_row(shape=shape, time_s=time_s).assign(flag=flag)
    again = pd.read_csv(io.StringIO(frame.to_csv(index=False)))
    row = operator_table(again, "own.csv").iloc[1]
    assert (row["shape"], row["flag"]) == (shape, flag)
    assert row["time_s"] == pytest.approx(time_s, rel=1e-12)
