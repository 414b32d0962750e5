"""Rows of SimuMax's table that lack a cell, or say what no model can be."""

from __future__ import annotations

from published_steps import modified_row, only

TABLE = "e2e_simumax_b200_8gpu"


def test_a_row_without_memory_still_has_a_time() -> None:
    table = modified_row(TABLE, real_max_alloc_gib=None)
    assert [row.measured_memory_nbytes for row in table.usable] == [None]


def test_a_dense_model_may_leave_out_its_expert_degree() -> None:
    assert only(modified_row(TABLE, ep=None)).config == only(modified_row(TABLE)).config


def test_expert_parallelism_of_a_dense_model_is_told() -> None:
    table = modified_row(TABLE, model="llama3-70b", ep=2)
    assert "has no experts, but ep is 2" in table.skipped[0].reason
