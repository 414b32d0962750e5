"""Held-out splits of each protocol, and recovery of a planted machine in each."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from planted_collectives import SIZES
from planted_collectives import planted_collectives as planted

from forerun.benchmarks.protocols.collectives import (
    COLLECTIVE_PROTOCOLS,
    scored_rows,
    splits,
    validate_collectives,
)
from forerun.benchmarks.protocols.scores import score_rows
from forerun.calib.errors import ConfigError


@pytest.mark.parametrize("protocol", ["random", "small_to_large", "few_8"])
def test_repeats_of_a_payload_are_on_one_side(protocol: str) -> None:
    table = planted(1, 2, repeats=3)
    curve = ["num_nodes", "nbytes"]
    for split in splits(table, protocol, [0, 1, 2]):
        known = set(map(tuple, table.loc[split.train, curve].to_numpy().tolist()))
        test_rows = set(map(tuple, table.loc[split.test, curve].to_numpy().tolist()))
        assert known
        assert test_rows
        assert not known & test_rows


def test_shares_of_payloads_are_those_of_the_protocol() -> None:
    table = planted(2, repeats=1)
    (split,) = splits(table, "random", [0])
    assert (split.train.sum(), split.test.sum()) == (17, 4)
    (split,) = splits(table, "few_8", [0])
    assert (split.train.sum(), split.test.sum()) == (8, 13)
    (split,) = splits(table, "small_to_large", [0, 1, 2])
    known, test_sizes = (table.loc[mask, "nbytes"] for mask in (split.train, split.test))
    assert sorted(known) == SIZES[:10]
    assert sorted(test_sizes) == SIZES[-4:]
    assert not list(splits(table, "few_24", [0]))


def test_seeds_differ_and_repeat() -> None:
    table = planted(2)
    first, other, repeated = (next(iter(splits(table, "random", [s]))).test for s in (0, 1, 0))
    assert not np.array_equal(first, other)
    assert np.array_equal(first, repeated)


def test_spans_are_known_up_to_a_quarter_of_the_nodes() -> None:
    table = planted(1, 2, 4, 8, 16)
    nodes = table["num_nodes"].to_numpy()
    results = [(set(nodes[s.train]), set(nodes[s.test])) for s in splits(table, "leave_span", [0])]
    # Nothing of the network is known where only one node is: 4 from 1 is left out.
    assert results == [({1, 2}, {8}), ({1, 2, 4}, {16})]


def test_machines_of_one_node_leave_out_the_most_ranks() -> None:
    table = pd.concat([planted(1), planted(2).assign(num_nodes=1)], ignore_index=True)
    (split,) = splits(table, "leave_span", [0])
    assert set(table.loc[split.train, "num_ranks"]) == {4}
    assert set(table.loc[split.test, "num_ranks"]) == {8}


def _with_ranks_per_node(table: pd.DataFrame, ranks_per_node: int) -> pd.DataFrame:
    return table.assign(num_ranks=table["num_nodes"] * ranks_per_node)


def test_nodes_are_known_up_to_the_next_smaller_number() -> None:
    table = planted(1, 2, 8, 128, repeats=1)
    nodes = table["num_nodes"].to_numpy()
    results = [(set(nodes[s.train]), set(nodes[s.test])) for s in splits(table, "leave_nodes", [0])]
    assert results == [({1, 2}, {8}), ({1, 2, 8}, {128})]
    assert not list(splits(planted(1), "leave_nodes", [0]))


def test_ranks_per_node_are_left_out_or_alone_and_one_node_is_always_known() -> None:
    tables = [planted(1, 2, repeats=1), _with_ranks_per_node(planted(2, 8, repeats=1), 1)]
    table = pd.concat([*tables, _with_ranks_per_node(planted(2, repeats=1), 8)], ignore_index=True)
    ranks_per_node = (table["num_ranks"] / table["num_nodes"]).to_numpy() * (table["num_nodes"] > 1)
    excluded = [set(ranks_per_node[s.test]) for s in splits(table, "leave_ranks_per_node", [0])]
    assert excluded == [{1}, {4}, {8}]
    for split in splits(table, "one_ranks_per_node", [0]):
        known = set(ranks_per_node[split.train])
        assert 0 in known and len(known) == 2
        assert set(ranks_per_node[split.test]) == {0, 1, 4, 8} - known
    assert not list(splits(planted(1, 2), "leave_ranks_per_node", [0]))


def test_each_collective_is_left_out_in_turn() -> None:
    table = pd.concat(
        [planted(2), planted(2).assign(collective="send")],
        ignore_index=True,
    )
    names = table["collective"].to_numpy()
    results = [
        (set(names[s.train]), set(names[s.test])) for s in splits(table, "leave_collective", [])
    ]
    assert results == [({"send"}, {"all_gather"}), ({"all_gather"}, {"send"})]
    assert not list(splits(planted(2), "leave_collective", [0]))


def test_a_pair_is_held_against_the_widest_of_its_node() -> None:
    table = pd.concat(
        [_with_ranks_per_node(planted(1), n) for n in (2, 4, 8)] + [planted(2)],
        ignore_index=True,
    )
    (split,) = splits(table, "pair_to_node", [0])
    for mask, ranks in ((split.train, 2), (split.test, 8)):
        assert set(table.loc[mask, "num_ranks"]) == {ranks}
        assert set(table.loc[mask, "num_nodes"]) == {1}


def test_scores_name_the_group_that_was_left_out() -> None:
    frame = validate_collectives(planted(2, 8), seeds=[0], protocols=["leave_nodes"])
    assert set(frame["group"]) == {"all_gather 32 on 8"}


def test_exchanges_that_send_once_per_node_are_groups_of_their_own() -> None:
    """Inside a node the number of chosen experts says nothing of the way."""
    table = planted(1, 2, repeats=1).assign(collective="all_to_all", num_chosen=8)
    both = pd.concat([table, table.assign(num_chosen=0)], ignore_index=True)
    frame = validate_collectives(both, seeds=[0], protocols=["random"])
    assert len(frame) == 2 * 4 * 2
    assert np.isfinite(frame["predicted_s"]).all()


@pytest.mark.parametrize(
    ("protocol", "bar"),
    [
        *(("random", 0.04), ("small_to_large", 0.2), ("few_8", 0.1)),
        *(("leave_span", 0.05), ("leave_nodes", 0.05)),
    ],
)
def test_a_planted_machine_is_found_again(protocol: str, bar: float) -> None:
    frame = validate_collectives(planted(2, 8), seeds=range(3), protocols=[protocol])
    (_, figures) = score_rows(frame, "t")
    names = [str(figures[name]) for name in ("table", "protocol", "group")]
    assert names[:2] == ["t", protocol] and names[2].startswith("all_gather")
    assert figures["mape_frac"] < bar
    assert figures["coverage_90_frac"] > 0.8


def test_flagged_rows_are_neither_fitted_nor_scored() -> None:
    table = planted(2)
    wrong = table.assign(time_s=100 * table["time_s"], flag="broken")
    with_wrong = pd.concat([table, wrong], ignore_index=True)
    clean, frame = (scored_rows(t, "random", seeds=[0]) for t in (table, with_wrong))
    pd.testing.assert_frame_equal(clean, frame)


def test_machines_do_not_learn_from_each_other() -> None:
    table = planted(2)
    slow = table.assign(fabric="slow", time_s=50 * table["time_s"])
    both = scored_rows(pd.concat([table, slow], ignore_index=True), "random", seeds=[0])
    alone = scored_rows(table, "random", seeds=[0])
    assert both["predicted_s"][: len(alone)].to_numpy() == pytest.approx(
        alone["predicted_s"].to_numpy()
    )


def test_a_protocol_without_rows_has_no_entry_and_an_unknown_one_is_named() -> None:
    table = planted(2)
    frame = validate_collectives(table, seeds=[0], protocols=tuple(COLLECTIVE_PROTOCOLS))
    assert set(frame["protocol"]) == {"random", "small_to_large", "few_8"}
    with pytest.raises(ConfigError, match="leave_gpu"):
        validate_collectives(table, seeds=[0], protocols=["leave_gpu"])
