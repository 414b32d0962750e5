"""Held-out splits of a table of collectives, and recovery of a planted machine."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from planted_collectives import planted_collectives

from forerun.benchmarks.protocols.scores import score_collectives, score_rows, transfer_splits


def test_repeats_of_a_payload_are_on_one_side_and_a_fifth_is_scored() -> None:
    table = planted_collectives(1, 2, repeats=3)
    curve = ["num_nodes", "nbytes"]
    drawn = list(transfer_splits(table, "random", [0, 1, 0]))
    for split in drawn:
        known, scored = (
            set(map(tuple, table.loc[mask, curve].to_numpy().tolist()))
            for mask in (split.train, split.test)
        )
        assert not known & scored
        assert (len(known), len(scored)) == (2 * 17, 2 * 4)
    assert np.array_equal(drawn[0].test, drawn[2].test)
    assert not np.array_equal(drawn[0].test, drawn[1].test)


def test_spans_are_known_up_to_a_quarter_of_the_nodes() -> None:
    table = planted_collectives(1, 2, 4, 8, 16)
    nodes = table["num_nodes"].to_numpy()
    splits = transfer_splits(table, "leave_span", [0, 1])
    results = [(set(nodes[s.train]), set(nodes[s.test])) for s in splits]
    # Nothing of the network is known where only one node is: 4 from 1 is left out.
    assert results == [({1, 2}, {8}), ({1, 2, 4}, {16})]


def test_machines_of_one_node_leave_out_the_most_ranks() -> None:
    parts = [planted_collectives(1), planted_collectives(2).assign(num_nodes=1)]
    table = pd.concat(parts, ignore_index=True)
    (split,) = transfer_splits(table, "leave_span", [0])
    assert set(table.loc[split.train, "num_ranks"]) == {4}
    assert set(table.loc[split.test, "num_ranks"]) == {8}
    assert not list(transfer_splits(planted_collectives(1), "leave_span", [0]))


@pytest.mark.parametrize(("protocol", "bar"), [("random", 0.04), ("leave_span", 0.05)])
def test_a_planted_machine_is_found_again(protocol: str, bar: float) -> None:
    frame = score_collectives(planted_collectives(2, 8), protocol, range(3))
    (_, figures) = score_rows(frame, "t")
    names = [figures[name] for name in ("table", "protocol", "group")]
    assert names == ["t", protocol, "all_gather"]
    assert figures["mape_frac"] < bar and figures["coverage_90_frac"] > 0.8


def test_flagged_rows_are_neither_fitted_nor_scored() -> None:
    table = planted_collectives(2)
    wrong = table.assign(time_s=100 * table["time_s"], flag="broken")
    both = pd.concat([table, wrong], ignore_index=True)
    clean, frame = (score_collectives(t, "random", [0]) for t in (table, both))
    pd.testing.assert_frame_equal(clean, frame)


def test_machines_do_not_learn_from_each_other() -> None:
    table = planted_collectives(2)
    slow = table.assign(fabric="slow", time_s=50 * table["time_s"])
    both = score_collectives(pd.concat([table, slow], ignore_index=True), "random", [0])
    alone = score_collectives(table, "random", [0])
    assert both["predicted_s"][: len(alone)].to_numpy() == pytest.approx(
        alone["predicted_s"].to_numpy()
    )
