"""Layers of experts: against real megatron.core, published sizes, and closed forms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_tensors import parameter_tensors

from forerun.benchmarks.published.model_shapes import public_shape
from forerun.calib.errors import ConfigError
from forerun.calib.fit.laws import work
from forerun.calib.layers._experts import expert_modules, routing
from forerun.calib.layers.blocks import BlockKind, block
from forerun.calib.network.groups import group_of
from forerun.calib.network.once_per_node import as_all_to_all
from forerun.calib.workload.collectives import Collective, GroupRole, OtherPass, Placement
from forerun.calib.workload.config import (
    Batch,
    Dispatcher,
    Experts,
    Parallelism,
    Precision,
    Recompute,
    RunConfig,
)
from forerun.calib.workload.operators import OperatorKind

needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed"
)
EIGHT = Experts(num_experts=8, top_k=2, ffn_hidden_size=32, imbalance=1.0)
EXCHANGE = replace(EIGHT, dispatcher=Dispatcher.ALL_TO_ALL)
SHARED = {"shared_ffn_hidden_size": 64}
DIST = {"is_optimizer_distributed": True}
OVERLAP = {**DIST, "overlaps_grad_reduce": True, "overlaps_param_gather": True}
SEQUENCE = {"is_sequence_parallel": True}
BF16 = {"precision": Precision.BF16}

Case = tuple[Experts, dict[str, Any], int]
CASES: dict[str, Case] = {
    "one rank": (EIGHT, {}, 0),
    "gathered over ep 2": (EIGHT, {"dp": 2, "par": {"ep": 2}}, 1),
    "gathered over tp 2 x ep 2": (EIGHT, {"tp": 2, "dp": 2, "par": {"ep": 2, **SEQUENCE}}, 3),
    "gathered, experts not over tp, fp32 router, shared with a gate": (
        replace(EIGHT, has_fp32_router=True, has_shared_gate=True, **SHARED),
        {"tp": 2, "dp": 4, "par": {"ep": 4, "etp": 1, **SEQUENCE, **DIST}, **BF16},
        2,
    ),
    "exchanged over ep 4, dense first layer, small buckets": (
        replace(EXCHANGE, layer_pattern=(False, True)),
        {"dp": 8, "par": {"ep": 4, "bucket_numel": 30_000, **OVERLAP}},
        5,
    ),
    "exchanged, experts over tp": (
        EXCHANGE,
        {"tp": 2, "dp": 2, "pp": 2, "par": {"ep": 2, **SEQUENCE}, **BF16},
        0,
    ),
    "exchanged, one expert on each rank, over more tp than the rest": (
        replace(EXCHANGE, num_experts=4, has_fp32_router=True),
        {"tp": 2, "dp": 8, "par": {"ep": 4, "etp": 4, **SEQUENCE, **DIST}, **BF16},
        9,
    ),
    "exchanged without ep": (EXCHANGE, {"tp": 2, "dp": 2, "par": SEQUENCE}, 0),
    "padded to the capacity": (
        replace(EXCHANGE, capacity_factor=1.25, is_padded_to_capacity=True),
        {"dp": 4, "par": {"ep": 2}},
        0,
    ),
    "full recompute": (
        EXCHANGE,
        {"dp": 2, "par": {"ep": 2}, "recompute": Recompute.FULL},
        0,
    ),
    "experts recomputed": (
        replace(EXCHANGE, **SHARED),
        {
            "dp": 2,
            "par": {"ep": 2},
            "recompute": Recompute.SELECTIVE,
            "recompute_modules": ("moe", "core_attn"),
        },
        0,
    ),
}


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_rank_is_that_of_megatron(
    name: str, llama: Callable[..., RunConfig], assert_as_megatron: Callable[..., None]
) -> None:
    experts, settings, rank = CASES[name]
    assert_as_megatron(llama(model={"experts": experts}, **settings), rank)


@needs_megatron
@pytest.mark.slow
def test_shared_experts_beside_the_exchange_are_those_of_megatron(
    llama: Callable[..., RunConfig], assert_as_megatron: Callable[..., None]
) -> None:
    """Their activation runs in the dispatcher's methods, where the hooks see no module."""
    experts = replace(EXCHANGE, overlaps_shared=True, shared_ffn_hidden_size=48)
    config = llama(model={"experts": experts}, tp=2, dp=2, par={"ep": 2, **SEQUENCE})
    unseen = [("activation", phase, (64, 48, 24)) for phase in ("forward", "backward")]
    assert_as_megatron(config, 0, unseen)


@needs_megatron
@pytest.mark.slow
def test_a_rank_of_1024_is_that_of_megatron(
    llama: Callable[..., RunConfig], assert_as_megatron: Callable[..., None]
) -> None:
    experts = replace(EXCHANGE, num_experts=128, top_k=8, ffn_hidden_size=16)
    model = {"num_layers": 8, "seq_length": 64, "num_attention_heads": 8, "num_query_groups": 4}
    config = llama(
        model={**model, "experts": experts, "has_qk_norm": True},
        **{"tp": 4, "pp": 4, "dp": 64, "micro": 1, "samples": 256, **BF16},
        par={"ep": 32, "etp": 1, **SEQUENCE, **OVERLAP},
    )
    assert config.parallelism.num_ranks == 1024
    assert_as_megatron(config, 37)


def sizes(name: str, num_dense: int = 0) -> tuple[float, float]:
    """Billions of parameters in all, and of those that one token passes."""
    shape = public_shape(name, seq_length=1)
    experts = shape.experts
    assert experts is not None
    pattern = tuple(layer >= num_dense for layer in range(shape.num_layers))
    shape = replace(shape, experts=replace(experts, layer_pattern=pattern))
    number = experts.num_experts
    config = RunConfig(
        model=shape,
        parallelism=Parallelism(dp=number, ep=number),
        batch=Batch(micro_batch_size=1, global_batch_size=number),
    )
    tensors = parameter_tensors(config, 0)
    one = sum(tensor.numel for tensor in tensors if tensor.is_expert)
    rest = sum(tensor.numel for tensor in tensors) - one
    return (rest + one * number) / 1e9, (rest + one * experts.top_k) / 1e9


@pytest.mark.parametrize(
    ("name", "num_dense", "total", "active"),
    [
        # Jiang et al. 2024; Qwen team 2025, Table 2; DeepSeek-AI 2024, both reports' abstracts.
        ("Mixtral 8x7B", 0, 46.7, 12.9),
        ("Qwen3 30B A3B", 0, 30.5, 3.3),
        ("Qwen3 235B A22B", 0, 235, 22),
        ("DeepSeek V2", 1, 236, 21),
        ("DeepSeek V3", 3, 671, 37),
    ],
)
def test_parameters_are_those_that_were_published(
    name: str, num_dense: int, total: float, active: float
) -> None:
    value, passed = sizes(name, num_dense)
    assert value == pytest.approx(total, rel=2e-3)
    assert passed == pytest.approx(active, rel=2e-2)


@st.composite
def layouts(draw: st.DrawFn) -> RunConfig:
    ep, tp = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2)))
    experts = Experts(
        num_experts=8,
        top_k=draw(st.integers(1, 8)),
        ffn_hidden_size=32,
        dispatcher=draw(st.sampled_from(list(Dispatcher))),
        is_grouped=draw(st.booleans()),
        imbalance=draw(st.sampled_from((1.0, 1.3))),
        capacity_factor=draw(st.sampled_from((0.0, 0.5, 1.0, 2.0))),
    )
    shape = public_shape("Mixtral 8x7B", seq_length=64)
    shape = replace(shape, num_layers=2, experts=experts)
    return RunConfig(
        model=shape,
        parallelism=Parallelism(
            tp=tp, dp=4, ep=ep, etp=draw(st.sampled_from((0, 1))), is_sequence_parallel=tp > 1
        ),
        batch=Batch(micro_batch_size=1, global_batch_size=4),
    )


@given(layouts())
def test_no_row_is_lost_between_the_router_and_the_experts(config: RunConfig) -> None:
    routed, experts, par = routing(config), config.model.experts, config.parallelism
    assert experts is not None
    assert sum(rows * number for rows, number in routed.loads) == routed.rows
    largest, smallest = max(routed.loads)[0], min(routed.loads)[0]
    assert largest - smallest <= 1
    limit = routed.tokens * experts.top_k
    assert routed.copies <= limit
    assert routed.copies * par.expert_tp <= routed.rows
    if experts.capacity_factor:
        share = limit / experts.num_experts * experts.capacity_factor
        assert routed.copies <= experts.num_experts * (share + 1)
        assert largest <= (share + 1) * par.expert_tp * par.ep


@given(layouts())
def test_grouped_and_single_products_are_the_same_work(config: RunConfig) -> None:
    experts = config.model.experts
    assert experts is not None
    shaped = {}
    for is_grouped in (False, True):
        model = replace(config.model, experts=replace(experts, is_grouped=is_grouped))
        result = block(replace(config, model=model), BlockKind.EXPERT_LAYER)
        products = {
            OperatorKind.GROUPED_LINEAR,
            OperatorKind.LINEAR_FC1,
            OperatorKind.LINEAR_FC2,
        }
        shaped[is_grouped] = sum(
            work(operator).flop * count
            for operator, count in (*result.forward, *result.backward)
            if operator.kind in products
        )
    routed = routing(config)
    ffn = experts.ffn_hidden_size // config.parallelism.expert_tp
    # Forwards once and backwards twice the three matrices of a gated network.
    assert shaped[True] == 3 * 2 * routed.rows * 3 * config.model.hidden_size * ffn
    assert shaped[True] == shaped[False]


@given(layouts())
def test_gradients_travel_as_far_as_tokens(config: RunConfig) -> None:
    """Every transfer of the forward pass has its mirror; counts and the routing map have none."""
    mirror = {
        Collective.ALL_GATHER: Collective.REDUCE_SCATTER,
        Collective.REDUCE_SCATTER: Collective.ALL_GATHER,
        Collective.ALL_TO_ALL: Collective.ALL_TO_ALL,
    }
    uses = expert_modules(config)[0].uses
    there = [
        (mirror[use.call.collective], use.call.role, use.call.nbytes)
        for use in uses
        for _ in range(use.count)
        if use.placement is Placement.FORWARD
    ]
    for use in uses:
        if use.placement is Placement.BACKWARD:
            for _ in range(use.count):
                there.remove((use.call.collective, use.call.role, use.call.nbytes))
    assert len(there) <= 1
    assert all(role is GroupRole.EXPERT_TP_EP for _, role, _ in there)


def test_the_fused_exchange_sends_less_than_a_row_for_each_expert(
    llama: Callable[..., RunConfig],
) -> None:
    def sent(dispatcher: Dispatcher) -> int:
        experts = replace(EIGHT, top_k=4, dispatcher=dispatcher)
        config = llama(model={"experts": experts}, dp=2, par={"ep": 2})
        return max(use.call.nbytes for use in expert_modules(config)[0].uses)

    # A token reaches 2 x (1 - C(4, 4) / C(8, 4)) of two ranks; all-to-all would send four rows.
    assert sent(Dispatcher.FLEX) / sent(Dispatcher.ALL_TO_ALL) == pytest.approx(
        2 * (1 - 1 / 70) / 4, rel=1e-2
    )


def test_between_nodes_a_token_goes_once_to_each_node(llama: Callable[..., RunConfig]) -> None:
    experts = replace(EIGHT, top_k=3, dispatcher=Dispatcher.FLEX)
    config = llama(model={"experts": experts}, dp=8, par={"ep": 8, "ranks_per_node": 2}, **BF16)
    choices = list(itertools.combinations(range(8), 3))
    # Two experts on each of four nodes.
    nodes = sum(len({expert // 2 for expert in choice}) for choice in choices) / len(choices)
    tokens = config.batch.micro_batch_size * config.model.seq_length
    (call,) = {use.call for use in expert_modules(config)[0].uses}
    assert (call.num_ranks, call.num_nodes, call.num_chosen) == (8, 4, 3)
    assert call.nbytes == tokens * 3 * config.model.hidden_size * 2
    plain, share = as_all_to_all(group_of(call))
    assert (plain.num_ranks, plain.num_nodes, plain.num_chosen) == (4, 4, 0)
    sent = share * call.nbytes
    assert sent == pytest.approx(tokens * nodes * config.model.hidden_size * 2, rel=0.02)


def test_the_exchange_runs_beside_another_micro_batch_where_there_is_one(
    llama: Callable[..., RunConfig],
) -> None:
    experts = replace(EXCHANGE, overlaps_exchange=True)
    several = llama(model={"experts": experts}, dp=2, par={"ep": 2})
    one = replace(several, batch=Batch(micro_batch_size=1, global_batch_size=2))
    for config, expected_pass in ((several, OtherPass.INPUTS), (one, OtherPass.NONE)):
        is_alone = config.num_microbatches == 1
        assert is_alone == (expected_pass is OtherPass.NONE)
        other_pass = {use.other_pass for use in block(config, BlockKind.EXPERT_LAYER).uses}
        assert other_pass == {expected_pass}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"imbalance": 0.9}, "imbalance 0.9 is below 1"),
        ({"is_padded_to_capacity": True}, "needs capacity_factor"),
    ],
)
def test_experts_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(EIGHT, **settings)
