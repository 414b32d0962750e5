"""On a narrow screen the step stays and what it rests on goes; without colour where it is not
wanted."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from forerun.launch.report.table import ReportTable, show_table

TABLE = ReportTable(
    key="layouts",
    title="Layouts",
    columns=("layout", "step", "90 %", "rests on"),
    rows=(
        ("TP8 PP4 DP2 ZeRO1 mbs2 full", "10.52 ms", "9.1 ms to 12 ms", "60 % extrapolated, 4 %"),
    ),
    spare=("rests on", "90 %"),
)


def printed(width: int, **console: object) -> str:
    out = io.StringIO()
    show_table(TABLE, Console(file=out, width=width, **console))  # type: ignore[arg-type]
    return out.getvalue()


@pytest.mark.parametrize(
    ("width", "seen"), [(120, ["9.1 ms to 12 ms", "60 %"]), (80, ["9.1 ms to 12 ms"]), (45, [])]
)
def test_columns_go_in_their_order(width: int, seen: list[str]) -> None:
    text = printed(width)
    assert "TP8 PP4 DP2 ZeRO1 mbs2 full" in text and "10.52 ms" in text
    assert [cell for cell in ("9.1 ms to 12 ms", "60 %") if cell in text] == seen
    assert "…" not in text


@given(width=st.integers(20, 140))
def test_what_is_kept_fits_or_nothing_is_left_to_spare(width: int) -> None:
    found = TABLE.within(width)
    assert found.columns[:2] == TABLE.columns[:2]
    assert "…" not in printed(width) or not {"90 %", "rests on"} & set(found.columns)


def test_no_colour_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(120, force_terminal=True)
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|4[0-7]|9[0-7])", text)
