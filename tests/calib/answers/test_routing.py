"""Prices of an imbalance by a step model whose step is a line in it, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tiny_shape import SMALL

from forerun.calib.answers.routing import (
    MeasuredRouting,
    imbalance_cost_frac,
    measured_loads,
    measured_routing,
    routed_s,
    routing_line,
    with_measured_routing,
)
from forerun.calib.answers.run_measurements import Measurements
from forerun.calib.workload.config import Batch, RunConfig
from forerun.calib.workload.model_shape import Experts, RankLoad
from forerun.calib.workload.parallelism import Parallelism
from forerun.calib.workload.routing import imbalance

EXPERTS = Experts(num_experts=8, top_k=2, ffn_hidden_size=64, imbalance=1.0)


def config(ep: int = 4, experts: Experts | None = EXPERTS) -> RunConfig:
    return RunConfig(
        model=replace(SMALL, num_layers=2, experts=experts),
        parallelism=Parallelism(dp=4, ep=ep),
        batch=Batch(micro_batch_size=1, global_batch_size=8),
    )


@dataclass
class Planted:
    """A step of ``fixed_s`` and of ``routed_s`` for each even share of tokens; ``luck_s`` is what
    one size, that of even routing, was measured wrong by."""

    fixed_s: float = 0.6
    routed_s: float = 0.4
    luck_s: float = 0.0

    def predict(self, layouts: Sequence[RunConfig]) -> Any:
        return SimpleNamespace(time_s=np.array([self.step_s(one) for one in layouts]))

    def step_s(self, candidate: RunConfig) -> float:
        experts = candidate.model.experts
        assert experts is not None and not experts.capacity_factor
        busiest = imbalance(experts, candidate.parallelism.ep)
        luck_s = self.luck_s if busiest == 1.0 else 0.0
        return self.fixed_s + self.routed_s * busiest + luck_s


def cost(planted: Any, busiest: float, layout: RunConfig | None = None) -> float | None:
    return imbalance_cost_frac(planted, layout or config(), busiest)


def test_the_cost_is_the_share_that_grows_with_the_tokens():
    assert cost(Planted(), 1.5) == pytest.approx(0.2)
    assert cost(Planted(), 1.0) == 0.0


def test_one_unlucky_size_does_not_make_an_imbalance_dear():
    assert cost(Planted(luck_s=0.3), 1.04) == pytest.approx(0.4 * 0.04 / 1.3)


def test_a_step_cannot_grow_faster_than_its_tokens():
    assert cost(Planted(fixed_s=-0.5, routed_s=1.0), 1.25) == pytest.approx(0.2)


def waiting_table(**waits: float) -> Any:
    """A window of one rank that waited so long on the groups of each role."""
    rows = [{"role": role, "wait_s": s, "window": 0, "rank": 0} for role, s in waits.items()]
    return SimpleNamespace(newest=lambda name: pd.DataFrame(rows))


def test_waiting_for_the_busiest_rank_counts_once():
    """The model's share of the exchange's waiting is subtracted from it, and from no other."""
    measured = Measurements(table=waiting_table(ep=0.3, dp=0.1, pp=5.0))
    assert measured.mean_waiting_s() == pytest.approx(0.4)
    assert measured.mean_waiting_s(0.25) == pytest.approx(0.15)
    assert measured.mean_waiting_s(0.7) == pytest.approx(0.1)


def test_only_what_was_counted_is_taken_off_the_waiting():
    load = RankLoad(num_ranks=4, in_pass=1.5, in_layers=1.5)
    counted = config(experts=replace(EXPERTS, measured=(load,)))
    steps: Any = Planted()
    assert routed_s(steps, config()) == 0.0
    assert routed_s(steps, counted) == pytest.approx(0.4 * 0.5)


def loads_table(**changes: Any) -> Any:
    row = {"window": 1, "stage": 0, "num_ranks": 4, "num_rows": 400}
    row |= {"num_most": 150, "num_fullest": 40, "num_microbatches": 5}
    rows = [row, row | {"window": 0, "num_most": 390}, row | changes]
    return SimpleNamespace(newest=lambda name: pd.DataFrame(rows))


def test_the_newest_window_and_the_stage_farthest_from_even_are_carried():
    (rank_load,) = measured_loads(loads_table(stage=1, num_most=180))
    assert (rank_load.num_ranks, rank_load.in_pass, rank_load.in_layers) == (4, 1.8, 2.0)
    carried = with_measured_routing(config(), measured_loads(loads_table()))
    assert carried.model.experts is not None
    assert imbalance(carried.model.experts, 4) == 1.5


@pytest.mark.parametrize("layout", [config(ep=1), config(ep=1, experts=None)])
def test_without_ranks_to_route_to_there_is_no_cost(layout: RunConfig):
    assert cost(Planted(), 1.5, layout) is None


def test_even_tokens_are_not_talked_of():
    even = MeasuredRouting(
        imbalance=1.01, steady=1.0, busiest_rank=0, by_window=(1.01,), by_layer={0: 1.01}
    )
    assert routing_line(even, 0.0) == routing_line(None, None) == ""
    turns = replace(even, imbalance=1.5, by_layer={0: 1.5})
    assert "no rank in particular" in routing_line(turns, 0.1)


def routing_of(*by_window: float) -> MeasuredRouting:
    return MeasuredRouting(
        imbalance=by_window[-1], steady=1.0, busiest_rank=0, by_window=by_window, by_layer={0: 1.5}
    )


@pytest.mark.parametrize(
    ("by_window", "expected"),
    [
        ((1.5,), "1.50 x the mean;"),
        ((1.5, 1.51), "1.51 x the mean;"),
        ((1.2, 1.5), "1.50 x the mean, 1.20 at first;"),
        ((1.2, 1.9, 1.5), "1.50 x the mean, 1.20 at first, at most 1.90;"),
        ((1.5, 1.1, 1.5), "1.50 x the mean, 1.50 at first, at least 1.10;"),
    ],
)
def test_the_line_says_how_it_moved_over_the_windows(by_window: tuple[float, ...], expected: str):
    assert expected in routing_line(routing_of(*by_window), None)


def test_ranks_that_keep_no_records_send_their_sums():
    """Two of four ranks record; the busiest of all is one that does not."""
    counted = [
        {"window": 0, "rank": r, "layer": 0, "ranks": "0,1", "num_rows": n, "num_most": 60}
        for r, n in ((0, 60), (1, 40))
    ]
    sums = [{"window": 0, "rank": r, "routed_rows": n} for r, n in enumerate((60, 40, 90, 10))]
    frames = {"routing": pd.DataFrame(counted), "ranks": pd.DataFrame(sums)}
    table: Any = SimpleNamespace(newest=frames.get, config=config)
    result = measured_routing(table)
    assert result is not None
    assert (result.busiest_rank, result.steady, result.imbalance) == (2, 1.8, 1.2)
    assert "rank 2, layer 0: 1.20 x (counted on 2 of 4 ranks)" in routing_line(result, None)
