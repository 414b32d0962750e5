"""Rows at experts that are planted by rank, layer and pass."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from forerun.calib.samples._routing import routing_rows

LAYERS, PASSES, RANKS = 2, 5, 4


def events(rows: np.ndarray, *, is_grouped: bool = False) -> pd.DataFrame:
    """Operator events where ``rows[rank, layer, pass]`` arrive at two experts of each rank."""
    results = []
    for (rank, layer, number), arrived in np.ndenumerate(rows):
        place = {"window": 0, "step": number, "microbatch": 0, "layer": layer, "rank": rank}
        half = int(arrived) // 2
        shapes = [("router", "64x32x8"), ("linear_fc2", "9x128x32")]
        if is_grouped:
            shapes += [("grouped_linear", f"2x{arrived}x32x128")] * 2
        else:
            shapes += [("linear_fc1", f"{n}x32x128") for n in (half, int(arrived) - half)]
        results += [place | {"kind": k, "shape": s, "phase": "forward"} for k, s in shapes]
        results += [place | {"kind": k, "shape": s, "phase": "backward"} for k, s in shapes]
    dense = {"window": 0, "step": 0, "microbatch": 0, "layer": 9, "rank": 0, "phase": "forward"}
    return pd.DataFrame([*results, dense | {"kind": "linear_fc1", "shape": "999x32x128"}])


def transfers(*groups: str) -> pd.DataFrame:
    rows = [
        {"rank": int(rank), "role": "ep", "ranks": group}
        for group in groups
        for rank in group.split(",")
    ]
    return pd.DataFrame(rows, columns=["rank", "role", "ranks"])


@pytest.mark.parametrize("is_grouped", [False, True])
def test_rows_are_summed_and_the_busiest_is_taken_pass_by_pass(is_grouped):
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 100, (RANKS, LAYERS, PASSES))
    frame = routing_rows(events(rows, is_grouped=is_grouped), transfers("0,1", "2,3"), None)
    assert len(frame) == RANKS * LAYERS
    for row in frame.to_dict("records"):
        rank, layer = row["rank"], row["layer"]
        pair = rows[[rank - rank % 2, rank - rank % 2 + 1], layer]
        assert row["num_rows"] == rows[rank, layer].sum()
        assert row["num_most"] == pair.max(axis=0).sum()
        assert row["num_passes"] == PASSES


def test_busiest_by_turns_costs_as_much_as_always_the_same():
    turns = np.zeros((2, 1, 4), int)
    turns[[0, 1, 0, 1], 0, range(4)] = 60
    frame = routing_rows(events(turns), transfers("0,1"), None)
    assert frame["num_rows"].tolist() == [120, 120]
    assert (frame["num_most"] / frame["num_rows"]).tolist() == [2.0, 2.0]


def test_a_pass_that_a_rank_lacks_compares_nothing():
    whole = events(np.full((2, 1, 3), 10))
    lost = whole[~((whole["rank"] == 1) & (whole["step"] == 2))]
    assert routing_rows(lost, transfers("0,1"), None)["num_passes"].tolist() == [2, 2]


def test_without_expert_parallelism_there_is_none():
    assert routing_rows(events(np.full((2, 1, 3), 10)), transfers(), None).empty
