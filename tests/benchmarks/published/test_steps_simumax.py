"""Rows of SimuMax's table that lack a cell, or say what no model can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from forerun.benchmarks.published.readers import read_steps

FILE = Path(__file__).parents[2] / "golden" / "steps" / "e2e_simumax_b200_8gpu.csv"


@pytest.fixture
def cells() -> dict[Any, Any]:
    return pd.read_csv(FILE).to_dict(orient="records")[0]


def test_a_row_without_memory_still_has_a_time(cells: dict[Any, Any]) -> None:
    table = read_steps(pd.DataFrame([cells | {"real_max_alloc_gib": None}]), "t")
    assert [row.measured_memory_nbytes for row in table.usable] == [None]


def test_a_dense_model_may_leave_out_its_expert_degree(cells: dict[Any, Any]) -> None:
    whole = read_steps(pd.DataFrame([cells]), "t").rows[0]
    assert read_steps(pd.DataFrame([cells | {"ep": None}]), "t").rows[0].config == whole.config


def test_expert_parallelism_of_a_dense_model_is_told(cells: dict[Any, Any]) -> None:
    table = read_steps(pd.DataFrame([cells | {"model": "llama3-70b", "ep": 2}]), "t")
    assert "has no experts, but ep is 2" in table.skipped[0].reason
