"""Ways to keep states, shardings and splits of the layers: what a host has, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from every_sharding import other_shardings

from forerun.calib.arguments.megatron_args import apply_options, options, rewrite_command
from forerun.calib.search.space import (
    num_nodes,
    splits,
    states,
)
from forerun.calib.workload.choices import layout_label
from forerun.calib.workload.config import Engine, Experts, Precision, RunConfig, Sharding

Layout = Callable[..., RunConfig]
H100 = "NVIDIA H100 80GB HBM3"
ZERO1 = {"is_optimizer_distributed": True, "overlaps_grad_reduce": True}
OVERLAPS = ("overlaps_grad_reduce", "overlaps_param_gather")


ZERO1_LABELS = (
    "DP16 ZeRO1 mbs2 offload:100",
    "DP16 ZeRO1 gradOverlap mbs2",
    "DP16 ZeRO1 gradOverlap mbs2 offload:100",
    "DP16 ZeRO1 noOverlap mbs2",
    "DP16 ZeRO1 noOverlap mbs2 offload:100",
)
"""The distributed optimizer in one instance, but as the run has it."""


@pytest.fixture
def megatron(layout: Layout) -> RunConfig:
    """On two nodes of eight."""
    par = {**ZERO1, "overlaps_param_gather": True, "ranks_per_node": 8}
    settings = {"precision": Precision.BF16, "device": H100, "framework": "Megatron-LM 0.16"}
    return layout(dp=16, samples=64, par=par, **settings)


def state_variants(layout: RunConfig) -> list[RunConfig]:
    """A layout in every way to keep its states that it can have."""
    return [one.of(layout) for one in states(layout, num_nodes(layout))]


def with_par(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, parallelism=replace(config.parallelism, **changes))


def test_megatron_has_an_optimizer_off_on_and_for_each_node(megatron: RunConfig) -> None:
    """With every overlap that goes with it, and its states here or with the host."""
    variants = [
        (
            layout_label(one),
            one.parallelism.overlaps_grad_reduce,
            one.parallelism.overlaps_param_gather,
            one.optimizer_offload_frac,
        )
        for one in state_variants(megatron)
    ]
    overlaps = [(True, True), (True, False), (False, False)]
    labels = dict(zip(overlaps, ("", " gradOverlap", " noOverlap"), strict=True))
    expected = [("DP16 mbs2", True, False, 0.0), ("DP16 noOverlap mbs2", False, False, 0.0)]
    shares = (("", 0.0), (" offload:100", 1.0))
    expected += [
        (f"DP16 ZeRO1{labels[on]} mbs2{word}", *on, frac)
        for on in overlaps
        for word, frac in shares
    ]
    expected += [(f"DP16 ZeRO1x2{labels[on]} mbs2", *on, 0.0) for on in overlaps]
    assert variants == expected


def test_no_way_that_is_accepted_is_missing(megatron: RunConfig) -> None:
    """All values of the fields, asked one by one; a gather ahead wants the reduction beside it."""
    expected = set()
    for is_on, number, reduces, gathers, frac in itertools.product(
        (False, True), (1, 2), (False, True), (False, True), (0.0, 1.0)
    ):
        if gathers > min(reduces, is_on) or (not is_on and number > 1):
            continue
        if frac and not (is_on and number == 1):
            continue
        par = dict(zip(OVERLAPS, (reduces, gathers), strict=True))
        one = with_par(
            megatron, is_optimizer_distributed=is_on, num_optimizer_instances=number, **par
        )
        expected.add(replace(one, optimizer_offload_frac=frac))
    assert set(state_variants(megatron)) == expected
    assert len(state_variants(megatron)) == len(expected)


def test_instances_are_those_that_divide_replicas_of_experts_too(megatron: RunConfig) -> None:
    experts = Experts(num_experts=16, ffn_hidden_size=32)
    config = replace(megatron, model=replace(megatron.model, experts=experts))
    for ep, expected in ((8, {1, 2}), (16, {1})):
        configs = state_variants(with_par(config, ep=ep))
        assert {one.parallelism.num_optimizer_instances for one in configs} == expected


def test_a_share_with_the_host_is_kept_as_it_is(megatron: RunConfig) -> None:
    configs = state_variants(replace(megatron, optimizer_offload_frac=0.5))
    assert {one.optimizer_offload_frac for one in configs} == {0.0, 0.5, 1.0}
    full = replace(megatron, precision=Precision.FP32, optimizer_offload_frac=0.5)
    assert {one.optimizer_offload_frac for one in state_variants(full)} == {0.0}


def test_states_of_a_width_of_their_own_are_the_distributed_optimizers(
    megatron: RunConfig,
) -> None:
    configs = state_variants(replace(megatron, optimizer_state_nbytes=6))
    assert configs and all(one.parallelism.is_optimizer_distributed for one in configs)


def test_nothing_overlaps_on_a_cpu_but_what_did(layout: Layout) -> None:
    for is_on in (False, True):
        par = dict.fromkeys(OVERLAPS, is_on) | {"is_optimizer_distributed": True}
        configs = state_variants(layout(dp=4, par=par))
        assert [layout_label(one) for one in configs] == ["DP4 mbs2", "DP4 ZeRO1 mbs2"]
        assert [one.parallelism.overlaps_grad_reduce for one in configs] == [is_on, is_on]
        assert [one.parallelism.overlaps_param_gather for one in configs] == [False, is_on]


def test_one_way_where_nothing_is_replicated_or_all_is_sharded(
    megatron: RunConfig, layout: Layout
) -> None:
    assert state_variants(layout(tp=2)) == [layout(tp=2)]
    for sharding in (Sharding.GRADS, Sharding.WEIGHTS):
        deep = with_par(megatron, sharding=sharding)
        assert state_variants(deep) == [deep]
    engine = with_par(megatron, engine=Engine.TORCH)
    assert state_variants(engine) == [engine]
    titan = replace(megatron, framework="torchtitan 0.2")
    assert state_variants(titan) == [titan]


def sharded_labels(config: RunConfig) -> list[str]:
    return list(dict.fromkeys(layout_label(one) for one in other_shardings(config)))


def test_other_shardings_are_each_stage_of_zero_and_an_instance_for_each_node(
    megatron: RunConfig,
) -> None:
    assert layout_label(megatron) == "DP16 ZeRO1 mbs2"
    assert sharded_labels(megatron) == [
        "DP16 mbs2",
        "DP16 noOverlap mbs2",
        *ZERO1_LABELS,
        "DP16 ZeRO1x2 mbs2",
        "DP16 ZeRO1x2 gradOverlap mbs2",
        "DP16 ZeRO1x2 noOverlap mbs2",
        "DP16 ZeRO2 mbs2",
        "DP16 FSDP mbs2",
    ]
    assert megatron not in other_shardings(megatron)
    # Megatron-FSDP has no pipeline.
    assert sharded_labels(with_par(megatron, pp=2, dp=8)) == [
        "PP2 DP8 mbs2",
        "PP2 DP8 noOverlap mbs2",
        *(label.replace("DP16", "PP2 DP8") for label in ZERO1_LABELS),
    ]
    assert sharded_labels(with_par(megatron, dp=1)) == []


def test_loops_of_ones_own_have_ddp_fsdp_and_two_copies(layout: Layout) -> None:
    par = {**ZERO1, "overlaps_param_gather": True, "sharding": Sharding.WEIGHTS}
    config = layout(dp=4, par=par, framework="PyTorch 2.13")
    assert sharded_labels(config) == ["DP4 mbs2", "DP4 HSDP mbs2"]


def test_a_command_with_other_shardings_reads_back(megatron: RunConfig) -> None:
    host = ["pretrain_gpt.py", "--use-distributed-optimizer", "--overlap-grad-reduce"]
    bare = with_par(megatron, **dict.fromkeys(OVERLAPS, False), is_optimizer_distributed=False)
    for one in other_shardings(megatron):
        assert apply_options(bare, options(one)) == one
        command = rewrite_command([*host, "--overlap-param-gather"], one, running=megatron)
        is_on = one.parallelism.is_optimizer_distributed
        assert ("--use-distributed-optimizer" in command) is is_on
        assert ("--use-megatron-fsdp" in command) is (
            one.parallelism.sharded in (Sharding.GRADS, Sharding.WEIGHTS)
        )


def test_splits_have_every_layer_and_fewer_at_the_ends_alone(layout: Layout) -> None:
    for num_layers, pp in itertools.product((4, 7, 32, 61), (2, 4, 8)):
        if pp > num_layers:
            continue
        config = layout(model={"num_layers": num_layers})
        results = splits(config, pp)
        assert len(set(results)) == len(results)
        assert (results[0] == ()) is (num_layers % pp == 0)
        for one in results[1:]:
            assert len(one) == pp and sum(one) == num_layers and len(set(one)) > 1
            first, *middle, last = one
            assert len(set(middle)) <= 1 and min(one) >= 0
            if middle:
                assert 0 <= middle[0] - first <= 2 and 0 <= middle[0] - last <= 3


def test_splits_of_two_stages_move_layers_from_one_to_the_other(layout: Layout) -> None:
    config = layout(pp=2, model={"num_layers": 8})
    results = {one for one in splits(config, 2) if one}
    assert {(5, 3), (3, 5)} <= results and all(max(one) - min(one) <= 3 for one in results)


def test_the_running_split_stays(layout: Layout) -> None:
    split = (1, 5, 1, 1)
    config = layout(pp=4, par={"chunk_layers": split}, model={"num_layers": 8})
    assert split in splits(config, 4) and split not in splits(config, 2)
    hosted = replace(config, framework="torchtitan 0.2")
    assert splits(hosted, 4) == [(), split] and splits(hosted, 1) == [()]
