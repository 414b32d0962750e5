"""Memory of many layouts at once is that of each alone, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from drawn_layouts import changed_in_one_field, drawn_layouts

from forerun.calib.memory.peak import memory
from forerun.calib.memory.pipelines import needed_nbytes
from forerun.calib.workload.layout_table import LayoutTable


@pytest.mark.parametrize(
    ("num_runs", "num_layouts"),
    [(30, 10), (3, 100), pytest.param(100, 100, marks=pytest.mark.slow)],
)
def test_layouts_need_as_much_together_as_alone(num_runs: int, num_layouts: int) -> None:
    layouts = drawn_layouts(num_runs, num_runs, num_layouts)
    table = LayoutTable.of(layouts)
    together = np.array(needed_nbytes(table))
    alone = np.hstack([needed_nbytes(LayoutTable.of([one])) for one in layouts])
    assert (together == alone).all()
    some = np.arange(len(table) - 1, -1, -3)
    assert (np.array(needed_nbytes(table.take(some))) == together[:, some]).all()


def test_an_estimate_is_that_of_the_fullest_stage_rounded() -> None:
    layouts = drawn_layouts(7, 20, 10)
    allocated, overhead = needed_nbytes(LayoutTable.of(layouts))
    estimates = [memory(one) for one in layouts]
    parts = 6
    assert [one.allocated_nbytes for one in estimates] == pytest.approx(allocated, abs=parts / 2)
    assert [one.overhead_nbytes for one in estimates] == overhead.tolist()


def test_no_layouts_need_nothing() -> None:
    table = LayoutTable.of(drawn_layouts(1, 1, 2)).take(np.empty(0, dtype=np.int64))
    allocated, overhead = needed_nbytes(table)
    assert len(allocated) == len(overhead) == 0


@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(10, 200), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_layouts_that_differ_in_one_field_need_what_each_needs_alone(seeds: range) -> None:
    for seed in seeds:
        layouts = changed_in_one_field(drawn_layouts(seed, 1, 40))
        together = np.array(needed_nbytes(LayoutTable.of(layouts)))
        alone = np.hstack([needed_nbytes(LayoutTable.of([one])) for one in layouts])
        assert (together == alone).all()
