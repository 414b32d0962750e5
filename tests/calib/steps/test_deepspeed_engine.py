"""Differences of DeepSpeed's pipeline engine from Megatron, in the one evaluation of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from forerun.calib.layers.blocks import BlockKind, block
from forerun.calib.layers.stage_work import collective_uses
from forerun.calib.workload.collectives import Collective, GroupRole, Placement
from forerun.calib.workload.config import Engine, RunConfig

Layout = Callable[..., RunConfig]


@pytest.fixture
def configs(layout: Layout) -> dict[Engine, RunConfig]:
    """The same layout under both engines."""
    par = {"is_optimizer_distributed": True}
    config = layout(tp=2, pp=2, dp=2, par=par)
    return {
        engine: replace(config, parallelism=replace(config.parallelism, engine=engine))
        for engine in Engine
    }


def test_ranks_of_a_tp_group_share_a_message(configs: dict[Engine, RunConfig]) -> None:
    sent = {
        engine: {u.call.nbytes for u in collective_uses(c, stage=0) if u.call.role is GroupRole.PP}
        for engine, c in configs.items()
    }
    (whole,), (share,) = sent[Engine.MEGATRON], sent[Engine.DEEPSPEED]
    model = configs[Engine.MEGATRON].model
    assert whole == model.seq_length * 2 * model.hidden_size * 4 and share == whole // 2


def test_zero_sums_whole_gradients_and_gathers_parameters(
    configs: dict[Engine, RunConfig],
) -> None:
    result = {}
    for engine, config in configs.items():
        of_dp = [u for u in collective_uses(config, stage=0) if u.call.role is GroupRole.DP]
        result[engine] = {(u.call.collective, u.placement) for u in of_dp}
    gather = (Collective.ALL_GATHER, Placement.PARAM_GATHER)
    reduce = Placement.GRAD_REDUCE
    assert result[Engine.MEGATRON] == {(Collective.REDUCE_SCATTER, reduce), gather}
    assert result[Engine.DEEPSPEED] == {(Collective.ALL_REDUCE, reduce), gather}


def test_nothing_hides_behind_a_product(configs: dict[Engine, RunConfig]) -> None:
    hidden = {
        engine: [u for u in block(c, BlockKind.LAYER).uses if u.is_overlapped]
        for engine, c in configs.items()
    }
    assert hidden[Engine.MEGATRON] and not hidden[Engine.DEEPSPEED]


def test_parallel_branches_share_the_sum_of_the_forward_pass(layout: Layout) -> None:
    """GPT-NeoX: one all-reduce forwards where a plain layer has two, two backwards in both."""
    counts = []
    for is_parallel in (False, True):
        config = layout(tp=2, model={"is_residual_parallel": is_parallel})
        uses = [u for u in block(config, BlockKind.LAYER).uses if u.call.role is GroupRole.TP]
        by_pass = {
            placement: sum(u.count for u in uses if u.placement is placement)
            for placement in (Placement.FORWARD, Placement.BACKWARD)
        }
        counts.append((by_pass[Placement.FORWARD], by_pass[Placement.BACKWARD]))
    assert counts == [(2, 2), (1, 2)]
