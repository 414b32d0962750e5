"""Config to options and back gives the same config, whatever the layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from model_options import model_options

from forerun.calib.arguments.megatron_args import (
    apply_options,
    options,
    rewrite_command,
)
from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.arguments.megatron_namespace import from_namespace
from forerun.calib.arguments.megatron_rules import required_values
from forerun.calib.arguments.megatron_values import layout_values, model_values
from forerun.calib.errors import ConfigError
from forerun.calib.workload.argument_fields import arguments_of
from forerun.calib.workload.config import (
    Attention,
    Batch,
    Cadence,
    ContextComm,
    Dispatcher,
    Experts,
    Fp8Recipe,
    LatentAttention,
    ModelShape,
    Normalization,
    Parallelism,
    PositionEmbedding,
    Precision,
    Recompute,
    RunConfig,
    Sharding,
)
from forerun.calib.workload.model_shape import AttentionWindow

DEGREES = st.sampled_from([1, 2, 4])
SCOPES = [(), ("attn",), ("moe_router", "moe_preprocess"), ("full_iteration",)]


@st.composite
def models(draw: st.DrawFn) -> ModelShape:
    num_layers = draw(st.sampled_from([8, 16]))
    has_bias = draw(st.booleans())
    latent = draw(st.none() | st.builds(LatentAttention, q_lora_rank=st.sampled_from([0, 96])))
    pattern = draw(
        st.just(()) | st.tuples(*[st.booleans()] * num_layers).filter(lambda p: not all(p))
    )
    is_hybrid = draw(st.booleans())
    capacity = draw(st.sampled_from([0.0, 1.25]))
    experts = draw(
        st.none()
        | st.builds(
            Experts,
            num_experts=st.sampled_from([4, 8]),
            top_k=st.integers(1, 4),
            ffn_hidden_size=st.sampled_from([64, 128]),
            shared_ffn_hidden_size=st.sampled_from([0, 64]),
            layer_pattern=st.just(() if is_hybrid else pattern),
            dispatcher=st.sampled_from(Dispatcher),
            capacity_factor=st.just(capacity),
            is_padded_to_capacity=st.booleans() if capacity else st.just(False),
            is_grouped=st.booleans(),
            overlaps_shared=st.booleans(),
            has_shared_gate=st.booleans(),
            is_balance_forced=st.booleans(),
            overlaps_exchange=st.booleans(),
            delays_weight_gradients=st.booleans(),
            has_fp32_router=st.booleans(),
            rank_capacity_factor=st.just(
                capacity_factor_of_rank := draw(st.sampled_from([0.0, 1.5]))
            ),
            stash_factor=st.sampled_from([0.0, 1.1]) if capacity_factor_of_rank else st.just(0.0),
        )
    )
    kinds = ("+-" if latent else "*-") + ("E" if experts else "")
    return ModelShape(
        num_layers=num_layers,
        hidden_size=256,
        ffn_hidden_size=1024,
        num_attention_heads=16,
        num_query_groups=16 if latent else draw(st.sampled_from([2, 8, 16])),
        kv_channels=16,
        seq_length=128,
        vocab_size=1024,
        is_gated=draw(st.booleans()),
        has_bias=has_bias,
        has_qkv_bias=not has_bias and draw(st.booleans()),
        has_qk_norm=draw(st.booleans()),
        is_tied=draw(st.booleans()),
        normalization=draw(st.sampled_from(Normalization)),
        position_embedding=draw(st.sampled_from(PositionEmbedding)),
        max_position_embeddings=128,
        experts=experts,
        latent_attention=latent,
        window=draw(st.none() | windows(num_layers)),
        num_prediction_layers=(num_predicted := draw(st.integers(0, 2))),
        **(_hybrid(draw, num_layers, kinds, num_predicted) if is_hybrid else {}),
    )


def windows(num_layers: int) -> st.SearchStrategy[AttentionWindow]:
    layers = st.tuples(*[st.booleans()] * num_layers).filter(lambda flags: len({*flags}) == 2)
    return st.builds(AttentionWindow, width=st.integers(1, 256), layers=st.just(()) | layers)


def _hybrid(draw: st.DrawFn, num_layers: int, kinds: str, num_predicted: int) -> dict[str, str]:
    return {
        "layer_kinds": draw(st.text(kinds, min_size=num_layers, max_size=num_layers)),
        "prediction_kinds": draw(st.text(kinds, min_size=1, max_size=2)) if num_predicted else "",
    }


SWITCHES = [name for name, one in arguments_of(RunConfig).items() if one.is_switch]
WIDE = st.sampled_from([(0, 0), (1, 1), (0, 2)])
SIZES_OF_STEPS: tuple[dict[str, Any], ...] = (
    *({}, {"rampup_batch_size": (16, 16, 1000)}),
    {"step_batch_size_schedule": "0:32 1B:64"},
)
"""How the batch of 64 is reached."""


@st.composite
def layouts(draw: st.DrawFn, num_layers: int, max_ep: int) -> Parallelism:
    tp, pp, cp = draw(DEGREES), draw(DEGREES), draw(st.sampled_from([1, 2, 4]))
    vp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    etp = draw(st.sampled_from([0, 1, 2]))
    cuts = draw(
        st.none() | st.lists(st.integers(0, num_layers), min_size=pp * vp - 1, max_size=pp * vp - 1)
    )
    chunks: tuple[int, ...] = ()
    if cuts is not None:
        edges = [0, *sorted(cuts), num_layers]
        chunks = tuple(b - a for a, b in pairwise(edges))
        chunks = () if len(set(chunks)) == 1 else chunks
    switches = ("is_optimizer_distributed", "overlaps_grad_reduce", "overlaps_param_gather")
    comms = [one for one in ContextComm if cp > 1 or one is not ContextComm.HIERARCHICAL]
    comm = draw(st.sampled_from(comms))
    is_cut = comm is ContextComm.HIERARCHICAL
    names = (*switches, "overlaps_tp", "pads_buckets", "is_pipeline_before_data")
    chosen: dict[str, Any] = {name: draw(st.booleans()) for name in names}
    if chosen["is_optimizer_distributed"]:
        depths = st.sampled_from([s for s in Sharding if s is not Sharding.NONE])
        chosen["sharding"] = draw(depths)
        if chosen["sharding"] is Sharding.WEIGHTS and draw(st.booleans()):
            # Only PyTorch's FSDP2 can keep weights, and it overlaps by itself.
            chosen |= {"regathers_weights": False, **dict.fromkeys(switches, True)}
    if chosen["overlaps_param_gather"] and vp > 1 and chosen.get("regathers_weights", True):
        chosen["gathers_beside_update"] = draw(st.booleans())
    return Parallelism(
        tp=tp,
        pp=pp,
        vp=vp,
        dp=4,
        cp=cp,
        ep=draw(st.sampled_from([1, 2])) if max_ep > 1 else 1,
        etp=0 if etp == tp else etp,
        chunk_layers=chunks,
        microbatch_group_size=draw(st.sampled_from([0, 8])) if vp > 1 and pp < 8 else 0,
        context_comm=comm,
        context_inner=draw(st.sampled_from([n for n in (1, 2, 4) if n <= cp])) if is_cut else 1,
        num_optimizer_instances=draw(st.sampled_from([1, 2])),
        is_sequence_parallel=tp > 1 and draw(st.booleans()),
        overlaps_p2p=(overlaps_p2p := vp == 1 or draw(st.booleans())),
        overlaps_p2p_ends=vp > 1 and overlaps_p2p and draw(st.booleans()),
        bucket_numel=draw(st.sampled_from([0, 1_000_000])),
        ranks_per_node=draw(st.sampled_from([4, 8])),
        **chosen,
    )


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    model = draw(models())
    fp8 = draw(st.sampled_from(Fp8Recipe))
    precision = draw(st.sampled_from(Precision))
    recompute = draw(st.sampled_from(Recompute))
    listed = st.sampled_from([(), ("mlp",), ("layernorm", "core_attn")])
    is_full = recompute is Recompute.FULL
    whole = st.integers(0, 1) if is_full else st.just(0)
    fields: dict[str, Any] = {
        "model": model,
        "batch": Batch(micro_batch_size=2, global_batch_size=64),
        "precision": precision,
        "fp8": fp8,
        "keeps_fp8_params": fp8 is not Fp8Recipe.NONE and draw(st.booleans()),
        "wide_layers": draw(WIDE) if fp8 is not Fp8Recipe.NONE else (0, 0),
        "attention": (attention := draw(st.sampled_from(Attention))),
        "fuses_norms": attention is not Attention.UNFUSED or draw(st.booleans()),
        "recompute": recompute,
        "recompute_num_layers": (block := draw(whole)),
        "recompute_span": draw(st.integers(1, 2)) if is_full and not block else 1,
        "recompute_modules": draw(listed) if recompute is Recompute.SELECTIVE else (),
        "distributes_saved_activations": recompute is Recompute.FULL and draw(st.booleans()),
        **(switches := {name: draw(st.booleans()) for name in SWITCHES}),
        "defers_head_gradients": False,
        "fuses_head": (fuses_head := switches["is_loss_fused"] and draw(st.booleans())),
        "keeps_fp32_logits": fuses_head or not switches["is_loss_fused"] or draw(st.booleans()),
        "reduces_grads_in_bf16": precision is not Precision.FP32 and draw(st.booleans()),
        "optimizer_state_nbytes": draw(st.sampled_from([0, 6, 10])),
        "offload_modules": draw(st.sampled_from([(), ("core_attn", "expert_fc1")])),
        "optimizer_offload_frac": (offload_frac := draw(st.sampled_from([0.0, 0.5, 1.0]))),
        "overlaps_optimizer_offload": offload_frac > 0 and draw(st.booleans()),
        "uses_cuda_graphs": (has_graphs := draw(st.booleans())),
        "cuda_graph_scope": draw(st.sampled_from(SCOPES)) if has_graphs else (),
        "hidden_dropout": draw(st.sampled_from([0.0, 0.1])),
        "cadence": Cadence(
            train_iters=draw(st.integers(0, 1000)),
            eval_iters=draw(st.integers(0, 10)),
            **draw(st.sampled_from(SIZES_OF_STEPS)),
        ),
    }
    max_ep = model.experts.num_experts if model.experts else 1
    par = draw(layouts(model.num_layers, max_ep))
    if par.pp > 1 and draw(st.booleans()):
        fields |= {"defers_head_gradients": True, "head_deferral_limit": draw(st.integers(0, 9))}
    try:
        return RunConfig(parallelism=par, **fields)
    except ConfigError:
        assume(False)
        raise


def torchrun(config: RunConfig) -> list[str]:
    par = config.parallelism
    nodes, rest = divmod(par.num_ranks, par.ranks_per_node)
    assume(not rest)
    return [
        "torchrun",
        f"--nproc-per-node={par.ranks_per_node}",
        "--nnodes",
        str(nodes),
        "train.py",
    ]


@settings(max_examples=60, deadline=None)
@given(config=configs())
def test_a_namespace_and_a_command_give_the_config_back(config: RunConfig) -> None:
    par = config.parallelism
    values = {**model_values(config), **layout_values(config)}
    ranks = {"world_size": par.num_ranks, "ranks_per_node": par.ranks_per_node}
    result = from_namespace(SimpleNamespace(**values, **ranks))
    assert result == config
    assert result.fuses_norms is config.fuses_norms
    command = [*torchrun(config), *model_options(config), *options(config)]
    description = config_from_command(command)
    assert (description.config, description.unknown) == (config, ())


@settings(max_examples=50, deadline=None)
@given(config=configs())
def test_options_lead_from_a_plain_layout_to_the_config(config: RunConfig) -> None:
    par = config.parallelism
    plain = replace(
        config,
        parallelism=Parallelism(dp=par.dp, ranks_per_node=par.ranks_per_node),
        fp8=Fp8Recipe.NONE,
        keeps_fp8_params=False,
        recompute=Recompute.NONE,
        recompute_num_layers=0,
        recompute_span=1,
        recompute_modules=(),
        distributes_saved_activations=False,
        is_loss_fused=False,
        keeps_fp32_logits=True,
        fuses_head=False,
        fuses_gradient_accumulation=True,
        reduces_grads_in_bf16=config.precision is Precision.FP16,
        uses_cuda_graphs=False,
        cuda_graph_scope=(),
    )
    argv = [*options(config), "--gpus", str(par.num_ranks)]
    assert apply_options(plain, argv) == config


def _with_required_options(config: RunConfig) -> RunConfig:
    """PyTorch's FSDP2 takes no fused accumulation, an optimizer on the host keeps exact states."""
    required = required_values(config, {})
    if "gradient_accumulation_fusion" in required:
        config = replace(config, fuses_gradient_accumulation=False)
    if "use_precision_aware_optimizer" in required and not config.optimizer_state_nbytes:
        weights = 2 if config.precision is Precision.BF16 else 4
        config = replace(config, optimizer_state_nbytes=weights + 8)
    return config


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(first=configs(), data=st.data())
def test_a_rewritten_command_means_the_new_layout(first: RunConfig, data: st.DataObject) -> None:
    max_ep = first.model.experts.num_experts if first.model.experts else 1
    par = data.draw(layouts(first.model.num_layers, max_ep))
    try:
        other = replace(first, parallelism=par, recompute=Recompute.NONE, recompute_num_layers=0)
        other = replace(other, recompute_modules=(), distributes_saved_activations=False)
        other = replace(other, is_loss_fused=not first.is_loss_fused, keeps_fp32_logits=True)
        other = replace(other, recompute_span=1, fuses_head=False)
        if par.pp == 1:  # where nothing can wait
            other = replace(other, defers_head_gradients=False, head_deferral_limit=0)
    except ConfigError:
        assume(False)
        raise
    host = ["train.py", *model_options(first), "--lr", "1e-4", *options(first), "--data-path", "a"]
    assume("--use-torch-fsdp2" not in host)  # what it says is left as it is
    written = rewrite_command(host, other)
    launcher = torchrun(other)[:-1]
    assert config_from_command([*launcher, *written]).config == _with_required_options(other)
    assert rewrite_command(written, other) == written
    assert {"--lr", "1e-4", "--data-path", "a"} <= set(written)
