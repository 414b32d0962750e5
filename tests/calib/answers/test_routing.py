"""Prices of an imbalance by a step model whose step is a line in it, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_shape import SMALL

from forerun.calib.answers.routing import MeasuredRouting, imbalance_cost_frac, routing_line
from forerun.calib.workload.config import Batch, RunConfig
from forerun.calib.workload.model_shape import Experts
from forerun.calib.workload.parallelism import Parallelism

EXPERTS = Experts(num_experts=8, top_k=2, ffn_hidden_size=64)


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

    def estimate(self, asked: RunConfig) -> Any:
        experts = asked.model.experts
        assert experts is not None and not experts.capacity_factor
        luck_s = self.luck_s if experts.imbalance == 1.0 else 0.0
        return SimpleNamespace(time_s=self.fixed_s + self.routed_s * experts.imbalance + luck_s)


def cost(planted: Any, imbalance: float, asked: RunConfig | None = None) -> float | None:
    return imbalance_cost_frac(planted, asked or config(), imbalance)


def test_the_cost_is_the_share_that_grows_with_the_tokens():
    assert cost(Planted(), 1.5) == pytest.approx(0.2)
    assert cost(Planted(), 1.0) == 0.0


def test_one_unlucky_size_does_not_make_an_imbalance_dear():
    assert cost(Planted(luck_s=0.3), 1.04) == pytest.approx(0.4 * 0.04 / 1.3)


def test_a_step_cannot_grow_faster_than_its_tokens():
    assert cost(Planted(fixed_s=-0.5, routed_s=1.0), 1.25) == pytest.approx(0.2)


@pytest.mark.parametrize("asked", [config(ep=1), config(ep=1, experts=None)])
def test_without_ranks_to_route_to_there_is_no_cost(asked: RunConfig):
    assert cost(Planted(), 1.5, asked) is None


def test_even_tokens_are_not_talked_of():
    even = MeasuredRouting(
        imbalance=1.01, steady=1.0, busiest_rank=0, by_window=(1.01,), by_layer={0: 1.01}
    )
    assert routing_line(even, 0.0) == routing_line(None, None) == ""
    turns = replace(even, imbalance=1.5, by_layer={0: 1.5})
    assert "each rank by turns" in routing_line(turns, 0.1)
