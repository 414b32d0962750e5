"""Tables in our own format: every rule is named, and what is written comes back."""

from __future__ import annotations

import io

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.errors import CalibrationError, ConfigError
from forerun.calib.fit.operator_kinds import KINDS
from forerun.calib.importers.canonical_steps import read_steps
from forerun.calib.importers.canonical_tables import (
    COLLECTIVE_COLUMNS,
    OPERATOR_COLUMNS,
    operator_table,
    read_table,
)
from forerun.calib.workload.operators import OperatorKind


@pytest.mark.parametrize("columns", [OPERATOR_COLUMNS, COLLECTIVE_COLUMNS])
def test_an_empty_table_is_no_data(columns: tuple[str, ...]) -> None:
    with pytest.raises(CalibrationError, match="no rows"):
        read_table(pd.DataFrame(columns=list(columns)), "empty.csv")


@pytest.mark.parametrize("read", [read_table, read_steps])
def test_a_table_of_others_is_told_what_it_lacks_and_who_converts_it(read) -> None:
    frame = pd.DataFrame({"devise": ["A"], "time": [1.0], "num_layer": [2]})
    with pytest.raises(ConfigError, match=r"convert\.py") as caught:
        read(frame, "mine.csv")
    text = str(caught.value)
    assert "mine.csv" in text and "(is " in text and "\n" not in text


def operator_rows(**changed: object) -> pd.DataFrame:
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
        ({"kind": "matmul"}, "'matmul' is not known"),
        ({"phase": "fwd"}, "'fwd' is not known"),
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
        operator_table(operator_rows(**changed), "own.csv")
    assert part in str(caught.value)


def test_a_row_with_a_flag_may_break_any_rule() -> None:
    frame = operator_rows(
        shape="0x0", time_s=None, element_nbytes=None, kind="other", flag="failed"
    )
    rows = operator_table(frame.assign(flag=frame["flag"].fillna("")), "own.csv")
    assert rows["flag"].tolist() == ["", "failed"] and rows["time_s"].isna().tolist()[1]


def test_every_measurable_kind_has_a_number_of_sizes() -> None:
    host = {OperatorKind.HOST_MICROBATCH, OperatorKind.HOST_STEP, OperatorKind.SHARD_UNIT}
    assert {kind for kind, law in KINDS.items() if law.num_sizes} == set(OperatorKind) - host


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 2**40), min_size=3, max_size=3),
    time_s=st.floats(1e-9, 1e3),
    flag=st.sampled_from(["", "outlier"]),
)
def test_a_row_of_our_own_format_survives(sizes: list[int], time_s: float, flag: str) -> None:
    shape = "x".join(map(str, sizes))
    frame = operator_rows(shape=shape, time_s=time_s).assign(flag=flag)
    reread = pd.read_csv(io.StringIO(frame.to_csv(index=False)))
    row = operator_table(reread, "own.csv").iloc[1]
    assert (row["shape"], row["flag"]) == (shape, flag)
    assert row["time_s"] == pytest.approx(time_s, rel=1e-12)
