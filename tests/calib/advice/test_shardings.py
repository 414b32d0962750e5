"""Other shardings of a layout: what a host has, what it is asked with, and what it cannot load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from planted_steps import steps_of

from forerun.calib.advice.plan import MOST_CANDIDATES, MOST_RESHARDED, Plan, layout_label, plan
from forerun.calib.advice.shardings import converter, sharded_otherwise
from forerun.calib.arguments.megatron_args import apply_options, options, rewrite_command
from forerun.calib.workload.config import Engine, Precision, RunConfig, Sharding

Layout = Callable[..., RunConfig]
H100 = "NVIDIA H100 80GB HBM3"
ZERO1 = {"is_optimizer_distributed": True, "overlaps_grad_reduce": True}


@pytest.fixture
def megatron(layout: Layout) -> RunConfig:
    par = {**ZERO1, "overlaps_param_gather": True, "ranks_per_node": 8}
    settings = {"precision": Precision.BF16, "device": H100, "framework": "Megatron-LM 0.16"}
    return layout(dp=16, samples=64, par=par, **settings)


def labels(*configs: RunConfig) -> list[str]:
    return [layout_label(one) for one in sharded_otherwise(configs)]


def test_megatron_has_each_stage_of_zero_and_an_instance_for_each_node(
    megatron: RunConfig,
) -> None:
    assert layout_label(megatron) == "DP16 ZeRO1 mbs2"
    assert labels(megatron) == [
        "DP16 mbs2",
        "DP16 ZeRO1x2 mbs2",
        "DP16 ZeRO2 mbs2",
        "DP16 FSDP mbs2",
    ]


def test_loops_of_ones_own_have_ddp_fsdp_and_two_copies(layout: Layout) -> None:
    par = {"is_optimizer_distributed": True, "sharding": Sharding.WEIGHTS}
    config = layout(dp=4, par={**par, "overlaps_param_gather": True}, framework="PyTorch 2.13")
    config = replace(config, parallelism=replace(config.parallelism, overlaps_grad_reduce=True))
    assert labels(config) == ["DP4 mbs2", "DP4 HSDP mbs2"]


def test_nothing_where_the_host_has_nothing(megatron: RunConfig, layout: Layout) -> None:
    assert labels(layout(tp=2)) == []
    engine = replace(megatron.parallelism, engine=Engine.DEEPSPEED)
    assert labels(replace(megatron, parallelism=engine)) == []
    # States of a width of their own, and the host's share, are the distributed optimizer's.
    for own in ({"optimizer_state_nbytes": 6}, {"optimizer_offload_frac": 0.5}):
        assert "DP16 mbs2" not in labels(replace(megatron, **own))


def test_a_command_with_other_shardings_reads_back(megatron: RunConfig) -> None:
    host = ["pretrain_gpt.py", "--use-distributed-optimizer", "--overlap-grad-reduce"]
    plain, *_ = sharded_otherwise([megatron])
    bare = replace(plain, parallelism=replace(plain.parallelism, overlaps_grad_reduce=False))
    for one in sharded_otherwise([megatron]):
        assert apply_options(bare, options(one)) == one
        command = rewrite_command([*host, "--overlap-param-gather"], one, running=megatron)
        is_on = one.parallelism.is_optimizer_distributed
        assert ("--use-distributed-optimizer" in command) is is_on
        assert ("--use-megatron-fsdp" in command) is (
            one.parallelism.sharded in (Sharding.GRADS, Sharding.WEIGHTS)
        )


def test_another_form_of_checkpoint_is_said_and_never_offered(
    megatron: RunConfig, planted: Callable[..., Any]
) -> None:
    found = plan(megatron, steps_of(planted()))
    assert found.best is not None and not converter(found.best.config, megatron)
    for one in found.candidates:
        is_same = one.config.parallelism.sharded is Sharding.OPTIMIZER
        assert bool(converter(one.config, megatron)) is not is_same
        if not is_same and one.time_frac < 0:
            assert "converter" in found.obstacle(one)


def test_shardings_do_not_multiply_a_plan(
    planned: Callable[..., Plan], planted: Callable[..., Any], megatron: RunConfig
) -> None:
    every = plan(megatron, steps_of(planted()), num_ranks=[8, 16, 32])
    assert len(every.candidates) <= MOST_CANDIDATES
    # Off, another number of instances, and two stages of FSDP, of the best that fit and do not.
    alone = sum(one.config.parallelism.sharded is Sharding.OPTIMIZER for one in every.candidates)
    assert alone and every.num_layouts <= alone_layouts(megatron) + 5 * (2 * MOST_RESHARDED + 1)


def alone_layouts(config: RunConfig) -> int:
    from forerun.calib.advice.enumeration import enumerate_layouts

    return sum(len(enumerate_layouts(config, number)) for number in (8, 16, 32))
