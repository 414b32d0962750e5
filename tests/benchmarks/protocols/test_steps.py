"""Which rows calibrate: folds of steps are honest, seeded, and within one machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from step_fixtures import grid, layout, row
from two_machine_folds import check, two_machines

from forerun.benchmarks.protocols.steps import (
    LEAVE_DEPTH,
    LEAVE_GROUP,
    LEAVE_RELEASE,
    LEAVE_WIDTH,
    MORE_NODES,
    SCALE_OUT,
    STEP_PROTOCOLS,
    named,
    series,
    series_name,
)
from forerun.benchmarks.scoring.step_acceptance import designed
from forerun.calib.workload.config import Fp8Recipe


@pytest.mark.parametrize("protocol", STEP_PROTOCOLS)
def test_named_protocols_split_too(protocol: str) -> None:
    rows = two_machines()
    folds = list(named(rows, protocol))
    for fold in folds:
        check(fold, rows)
        series_names = {series_name(rows[i]) for i in (*fold.train, *fold.test)}
        is_of_series = protocol in (SCALE_OUT, MORE_NODES)
        size = len(rows) // 4 if is_of_series else len(rows) // 2
        assert len(fold.train) + len(fold.test) == size
        assert len(series_names) == 1 or not is_of_series
    assert bool(folds) == (protocol not in (LEAVE_WIDTH, LEAVE_RELEASE))


def test_a_release_is_left_out_whole() -> None:
    rows = [
        replace(row, config=replace(row.config, framework=f"core 0.{i % 3}"))
        for i, row in enumerate(grid())
    ]
    folds = list(named(rows, LEAVE_RELEASE))
    assert len(folds) == 3
    for fold in folds:
        (excluded_release,) = {rows[i].config.framework for i in fold.test}
        assert excluded_release not in {rows[i].config.framework for i in fold.train}


def test_what_is_left_out_is_whole() -> None:
    rows = two_machines()
    for protocol, key in (
        (LEAVE_GROUP, lambda r: r.group),
        (LEAVE_DEPTH, lambda r: r.config.model.num_layers),
    ):
        for fold in named(rows, protocol):
            excluded_keys = {key(rows[i]) for i in fold.test}
            assert len(excluded_keys) == 1 and not excluded_keys & {
                key(rows[i]) for i in fold.train
            }
    for fold in named(rows, SCALE_OUT):
        most = max(rows[i].num_ranks for i in fold.train)
        assert all(rows[i].num_ranks > most for i in fold.test)


def test_a_series_is_one_model_and_stack_on_one_machine_whatever_its_layouts() -> None:
    rows = two_machines()
    assert len(series(rows)) == 4  # two machines, two depths
    released = [replace(r, config=replace(r.config, framework="2")) for r in rows[:2]]
    faster = [replace(r, config=replace(r.config, fp8=Fp8Recipe.DELAYED)) for r in rows[:2]]
    assert len({series_name(row) for row in (*rows[:2], *released, *faster)}) == 6
    wide = layout(2, 1, 4, 1)
    padded = replace(wide, model=replace(wide.model, vocab_size=51456))
    assert series_name(row(wide, 1.0)) == series_name(row(padded, 1.0))


def test_all_layouts_of_the_fewest_nodes_calibrate_and_unknown_nodes_have_no_part() -> None:
    rows = [row(layout(tp, 1, dp, 1), 1.0) for tp, dp in ((1, 4), (2, 4), (4, 4), (8, 8))]
    loose = replace(rows[3].config.parallelism, ranks_per_node=0)
    rows.append(replace(rows[3], config=replace(rows[3].config, parallelism=loose)))
    (fold,) = named(rows, MORE_NODES)  # 4 and 8 ranks on one node, 16 on two, 64 on eight
    assert (fold.train, fold.test) == ((0, 1), (2, 3))
    assert not list(named(rows[:2], MORE_NODES))


def test_series_of_too_few_scales_and_flagged_rows_are_left_out() -> None:
    sizes = (1, 2, 4)
    rows = [row(layout(1, 1, dp, 1), 1.0) for dp in sizes]
    assert list(series(rows, 3).values()) == [[0, 1, 2]]
    rows[1] = replace(rows[1], flag="bad")
    assert list(series(rows, 2).values()) == [[0, 2]] and not series(rows, 3)
    (fold,) = named(rows, SCALE_OUT)
    assert (fold.train, fold.test) == ((0,), (2,))


def test_a_design_chooses_within_the_usable_rows() -> None:
    rows = two_machines()
    rows[0] = replace(rows[0], flag="bad")
    folds = list(
        designed(rows, 2, lambda usable_rows, count: list(range(len(usable_rows)))[-count:])
    )
    assert len(folds) == 2
    for fold in folds:
        check(fold, rows)
        assert list(fold.train) == sorted((*fold.train, *fold.test))[-2:]
