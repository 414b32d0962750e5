"""Layouts that a checkpoint cannot be loaded into: each says so, and none is offered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from planted_steps import steps_of

from forerun.calib.advice.planning import converter, plan
from forerun.calib.arguments.short_names import LayoutConstraint
from forerun.calib.search.space import other_shardings
from forerun.calib.workload.config import Precision, RunConfig, Sharding

Layout = Callable[..., RunConfig]
MEGATRON_PARALLELISM = {
    "overlaps_grad_reduce": True,
    "overlaps_param_gather": True,
    "ranks_per_node": 8,
}


@pytest.fixture
def megatron(layout: Layout) -> RunConfig:
    """On two nodes of eight, slow for its small micro-batches over tp."""
    par = {**MEGATRON_PARALLELISM, "is_optimizer_distributed": True, "is_sequence_parallel": True}
    settings = {"precision": Precision.BF16, "device": "NVIDIA H100 80GB HBM3"}
    return layout(tp=4, dp=4, micro=1, samples=64, par=par, **settings)


def test_each_form_of_megatron_wants_a_converter_to_another(megatron: RunConfig) -> None:
    forms = {Sharding.NONE: 0, Sharding.OPTIMIZER: 1, Sharding.GRADS: 2, Sharding.WEIGHTS: 2}
    every = [megatron, *other_shardings(megatron)]
    assert {one.parallelism.sharded for one in every} == set(forms)
    for one in every:
        for other in every:
            is_same = forms[one.parallelism.sharded] == forms[other.parallelism.sharded]
            assert (converter(one, other) == "") is is_same
            hosted = replace(other, framework="torchtitan 0.2")
            assert converter(one, hosted) == ""


def test_another_form_of_checkpoint_is_said_and_never_offered(
    megatron: RunConfig, planted: Callable[..., Any]
) -> None:
    result = plan(megatron, steps_of(planted()))
    assert result.best is not None and not converter(result.best.config, megatron)
    is_other = [
        one.config.parallelism.sharded is not Sharding.OPTIMIZER for one in result.candidates
    ]
    assert any(is_other) and not all(is_other)
    for one, other in zip(result.candidates, is_other, strict=True):
        assert bool(converter(one.config, megatron)) is other
        if other and one.time_frac < 0:
            assert "converter" in result.obstacle(one)


@pytest.mark.slow
def test_what_can_be_loaded_is_looked_for_behind_what_cannot(
    megatron: RunConfig, planted: Callable[..., Any]
) -> None:
    """All of the twenty best are whole; the best that is offered stands behind them."""
    slow = planted(bytes_per_s=1e6, latency_s=0.0)
    result = plan(megatron, steps_of(slow))
    alone = plan(megatron, steps_of(slow), keep=LayoutConstraint.parse("sharding=optimizer"))
    assert result.best is not None and alone.best is not None
    assert result.best.config == alone.best.config
    only = plan(megatron, steps_of(slow), keep=LayoutConstraint.parse("sharding=none"))
    assert only.candidates and only.best is None and "converter" in only.nearest_miss
