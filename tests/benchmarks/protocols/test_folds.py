"""Which rows calibrate: folds of steps are honest, seeded, and within one machine."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from step_fixtures import grid
from two_machine_folds import check, two_machines

from forerun.benchmarks.protocols.scores import MAX_HELD_OUT, MAX_SUBSETS, step_folds


@given(count=st.integers(0, 9), draws=st.integers(1, 4), flagged=st.sets(st.integers(0, 11)))
def test_folds_split_the_usable_rows_of_a_machine(
    count: int, draws: int, flagged: set[int]
) -> None:
    rows = two_machines()
    rows = [replace(r, flag="bad") if i in flagged else r for i, r in enumerate(rows)]
    for fold in step_folds(rows, count, draws):
        check(fold, rows)
        usable = [i for i, r in enumerate(rows) if r.machine == fold.machine and not r.flag]
        assert len(fold.train) == count and sorted((*fold.train, *fold.test)) == usable


def test_all_subsets_where_few_and_draws_where_many() -> None:
    rows = grid()[:12]
    assert len(list(step_folds(rows, 3, 5))) == math.comb(12, 3) <= MAX_SUBSETS
    folds = list(step_folds(rows, 5, 7))
    assert math.comb(12, 5) > MAX_SUBSETS and len(folds) == 7
    assert len({fold.train for fold in folds}) == 7
    assert folds == list(step_folds(rows, 5, 7))
    assert [fold.draw for fold in folds] == list(range(7))


def test_one_out_leaves_every_row_out_once_up_to_a_number() -> None:
    rows = grid()
    folds = list(step_folds(rows, None))
    assert sorted(fold.test for fold in folds) == [(i,) for i in range(len(rows))]
    many = rows * (MAX_HELD_OUT // len(rows) + 2)
    assert len(list(step_folds(many, None))) == MAX_HELD_OUT
