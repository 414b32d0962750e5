"""Layouts as columns give back the layouts that they were made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.workload.config import Recompute, RunConfig
from forerun.calib.workload.layout_table import FIELDS, LayoutTable, all_but, distinct_rows

Layout = Callable[..., RunConfig]


def test_every_field_is_a_column(layout: Layout) -> None:
    config = layout()
    parts = (config, config.parallelism, config.batch)
    names = [one.name for part in parts for one in fields(part)]
    assert sorted(FIELDS) == sorted({*names} - {"parallelism", "batch"})
    assert len(set(FIELDS)) == len(FIELDS)


def test_layouts_come_back(layout: Layout) -> None:
    some = [layout(tp=2, dp=2), layout(dp=4), layout(pp=2, dp=2)]
    some.append(replace(some[0], recompute=Recompute.FULL, program="train.py"))
    table = LayoutTable.of(some)
    assert list(table.configs()) == some
    assert [one.program for one in table.configs()] == ["", "", "", "train.py"]
    assert list(table.take(np.array([2, 0])).configs()) == [some[2], some[0]]
    assert table.numbers("tp").tolist() == [2, 1, 1, 2]
    assert table.num_microbatches.tolist() == [one.num_microbatches for one in some]
    assert list(LayoutTable.of(some[:1]).configs()) == some[:1]


def test_a_function_is_asked_once_for_each_combination(layout: Layout) -> None:
    some = [layout(tp=2, dp=2), layout(dp=4), layout(tp=2, dp=2), layout(pp=2, dp=2)]
    table = LayoutTable.of(some)
    asked: list[Any] = []

    def tp_of(config: RunConfig) -> int:
        asked.append(config)
        return config.parallelism.tp

    values, places = table.each(tp_of, ("tp",))
    assert [values[place] for place in places] == [2, 1, 2, 1] and len(asked) == 2
    assert len(table.distinct(all_but("dp"))[0]) == 3


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 2**60), st.booleans()), min_size=1))
def test_rows_are_told_apart_by_their_values(rows: list[tuple[int, int, bool]]) -> None:
    columns = [np.array([row[place] for row in rows]) for place in range(3)]
    firsts, places = distinct_rows(columns, len(rows))
    assert [rows[firsts[place]] for place in places] == rows
    assert len(firsts) == len(set(rows))
