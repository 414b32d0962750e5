"""Loads of any number of ranks, against sums over planted rows of single experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from tiny_shape import SMALL

from forerun.calib.samples._routing import load_rows
from forerun.calib.workload.config import Batch, RunConfig
from forerun.calib.workload.model_shape import Experts
from forerun.calib.workload.parallelism import Parallelism

EXPERTS, LAYERS, STEPS = 8, 3, 4


def config(ep: int, dp: int = 4) -> RunConfig:
    experts = Experts(num_experts=EXPERTS, top_k=2, ffn_hidden_size=64)
    return RunConfig(
        model=replace(SMALL, num_layers=LAYERS, experts=experts),
        parallelism=Parallelism(dp=dp, ep=ep),
        batch=Batch(micro_batch_size=1, global_batch_size=dp),
    )


def events(rows: np.ndarray, ep: int, *, is_grouped: bool = False) -> pd.DataFrame:
    """Return arrivals of ``rows[group, step, layer, expert]`` in each group of ``ep`` ranks."""
    results = []
    for (group, step, layer, expert), arrived in np.ndenumerate(rows):
        num_local = EXPERTS // ep
        place = {
            "window": 0,
            "step": step,
            "microbatch": 0,
            "layer": layer,
            "rank": group * ep + expert // num_local,
            "stage": 0,
            "phase": "forward",
            "start_ns": 1000 * layer + 10 * expert,
        }
        results.append(place | {"kind": "router", "shape": "64x32x8", "start_ns": 0})
        if not is_grouped:
            results.append(place | {"kind": "linear_fc1", "shape": f"{arrived}x32x128"})
        elif expert % num_local == 0:
            whole = rows[group, step, layer, expert : expert + num_local].sum()
            results.append(
                place | {"kind": "grouped_linear", "shape": f"{num_local}x{whole}x32x128"}
            )
    # Records come in any order.
    return pd.DataFrame(results).sample(frac=1.0, random_state=0)


def transfers(num_groups: int, ep: int) -> pd.DataFrame:
    texts = [",".join(str(g * ep + r) for r in range(ep)) for g in range(num_groups)]
    rows = [{"rank": int(r), "role": "ep", "ranks": t} for t in texts for r in t.split(",")]
    return pd.DataFrame(rows if ep > 1 else [], columns=["rank", "role", "ranks"])


def planted(num_groups: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 100, (num_groups, STEPS, LAYERS, EXPERTS))


def by_hand(rows: np.ndarray, num_ranks: int) -> tuple[float, float]:
    """Busiest over mean: of each pass, and of the fullest step through all layers."""
    loads = rows.reshape(*rows.shape[:-1], num_ranks, -1).sum(axis=-1)
    mean = loads.mean()
    return loads.max(axis=-1).mean() / mean, loads.sum(axis=2).max() / (mean * LAYERS)


def load_ratios(frame: pd.DataFrame, num_ranks: int) -> tuple[float, float]:
    (row,) = frame[frame["num_ranks"] == num_ranks].to_dict("records")
    mean = row["num_rows"] / num_ranks
    return row["num_most"] / mean, row["num_fullest"] * row["num_microbatches"] / mean


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_fewer_ranks_hold_the_experts_of_neighbours(num_ranks):
    rows = planted(2)
    frame = load_rows(events(rows, 4), transfers(2, 4), config(4, dp=8))
    assert load_ratios(frame, num_ranks) == pytest.approx(by_hand(rows, num_ranks))


@pytest.mark.parametrize("is_grouped", [False, True])
def test_of_grouped_products_only_the_ranks_are_known(is_grouped):
    rows = planted(1)
    frame = load_rows(events(rows, 4, is_grouped=is_grouped), transfers(1, 4), config(4))
    assert load_ratios(frame, 2) == pytest.approx(by_hand(rows, 2))
    assert set(frame["num_ranks"]) == ({2, 4} if is_grouped else {2, 4, 8})


def test_grouped_products_whose_host_knew_its_experts_tell_of_each():
    rows = planted(1)
    seen = events(rows, 4, is_grouped=True)
    texts = []
    for event in seen.to_dict("records"):
        first = (event["rank"] % 4) * 2
        pair = rows[0, event["step"], event["layer"], first : first + 2]
        texts.append(",".join(map(str, pair)) if event["kind"] == "grouped_linear" else "")
    frame = load_rows(seen.assign(rows=texts), transfers(1, 4), config(4))
    for num_ranks in (2, 4, 8):
        assert load_ratios(frame, num_ranks) == pytest.approx(by_hand(rows, num_ranks))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_with_all_experts_tell_what_any_split_would_get(num_ranks):
    """As many ranks as would exchange their tokens are added up."""
    rows = planted(4)
    frame = load_rows(events(rows, 1), transfers(4, 1), config(1))
    joined = rows.reshape(4 // num_ranks, num_ranks, STEPS, LAYERS, EXPERTS).sum(axis=1)
    assert load_ratios(frame, num_ranks) == pytest.approx(by_hand(joined, num_ranks))


def test_a_group_that_lacks_a_rank_is_left_out():
    rows = planted(2)
    seen = events(rows, 4)
    frame = load_rows(seen[seen["rank"] != 5], transfers(2, 4), config(4, dp=8))
    assert load_ratios(frame, 4) == pytest.approx(by_hand(rows[:1], 4))


def test_without_experts_or_groups_there_is_none():
    assert load_rows(events(planted(1), 4), transfers(1, 4), None).empty
    assert load_rows(events(planted(1), 4), transfers(0, 4), config(4)).empty
