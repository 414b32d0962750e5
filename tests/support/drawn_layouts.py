"""Layouts drawn in every field in which layouts vary, of models of every kind."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from tiny_shape import SMALL

from forerun.calib.errors import ConfigError
from forerun.calib.workload.config import (
    Attention,
    Batch,
    ContextComm,
    Engine,
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
from forerun.calib.workload.layout_table import FIELDS, LayoutTable
from forerun.calib.workload.model_shape import OpaqueLayer

_GATED: dict[str, Any] = {
    **{"is_gated": True, "has_bias": False, "is_tied": False},
    "normalization": Normalization.RMS_NORM,
    "position_embedding": PositionEmbedding.ROPE,
}
_EXPERTS = Experts(
    num_experts=8,
    top_k=3,
    ffn_hidden_size=48,
    shared_ffn_hidden_size=32,
    has_shared_gate=True,
    is_grouped=True,
)
_LATENT = LatentAttention(
    q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8
)
_MIXER = OpaqueLayer(symbol="M", split_numel=9000, whole_numel=70, saved_width=200)
_PATTERN = (False, *(True,) * 7, False, *(True,) * 3)
_MODELS: tuple[dict[str, Any], ...] = (
    {},
    {**_GATED, "num_query_groups": 2, "has_qk_norm": True, "has_attention_gate": True},
    {**_GATED, "num_prediction_layers": 2},
    {**_GATED, "experts": _EXPERTS, "latent_attention": _LATENT, "num_prediction_layers": 1},
    {**_GATED, "experts": replace(_EXPERTS, layer_pattern=_PATTERN, capacity_factor=1.3)},
    {"experts": replace(_EXPERTS, is_grouped=False, imbalance=1.3, shared_ffn_hidden_size=0)},
    {**_GATED, "experts": replace(_EXPERTS, rank_capacity_factor=1.5, stash_factor=1.2)},
    {**_GATED, "layer_kinds": "*-*-M-*EM-*E", "experts": _EXPERTS, "opaque_layers": (_MIXER,)},
    {
        **{**_GATED, "layer_kinds": "M*M-MM*-M*M-", "opaque_layers": (_MIXER,)},
        **{"prediction_kinds": "M*", "num_prediction_layers": 2},
    },
)
_RUNS: Mapping[str, tuple[Any, ...]] = {
    "precision": (Precision.BF16, Precision.BF16, Precision.FP32),
    "device": ("H100", "H100", "cpu", "V100"),
    "framework": ("Megatron-LM", "Megatron-LM", "transformers"),
    "fp8": (Fp8Recipe.NONE, *Fp8Recipe),
    "keeps_fp8_params": (False, True),
    "attention": tuple(Attention),
    "hidden_dropout": (0.0, 0.1),
    "attention_dropout": (0.0, 0.1),
    "keeps_fp32_logits": (True, False),
    "fuses_head": (False, False, True),
    "fuses_gradient_accumulation": (True, False),
    "fuses_norms": (True, False),
    "reduces_grads_in_bf16": (False, True),
    "optimizer_state_nbytes": (0, 6),
    "is_compiled": (False, True),
    "defers_head_gradients": (False, True),
    "head_deferral_limit": (0, 3),
    "offload_modules": ((), (), ("core_attn", "attn_proj"), ("fused_group_mlp", "mlp_norm")),
}
_DEGREES: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tp", "cp", "ep"), (1, 1, 2, 4)),
    **dict.fromkeys(("dp", "pp"), (1, 2, 3, 4)),
    "vp": (1, 1, 2, 3),
    "etp": (0, 0, 1, 2),
    "microbatch_group_size": (0, 0, 4, 6),
    "num_optimizer_instances": (1, 1, 2),
    "is_sequence_parallel": (True, False),
    "is_optimizer_distributed": (True, False),
    "sharding": tuple(Sharding),
    "regathers_weights": (True, False),
    "keeps_grads_whole": (False, True),
    "overlaps_grad_reduce": (True, False),
}
_AGAIN: Mapping[str, tuple[Any, ...]] = {
    "recompute": tuple(Recompute),
    "recompute_num_layers": (0, 0, 1, 2),
    "recompute_span": (1, 1, 2, 3),
    "recompute_modules": (
        (),
        ("mlp",),
        ("moe",),
        ("layernorm", "moe_act"),
        ("core_attn", "mla_up_proj", "shared_experts"),
        ("mlp", "layernorm", "moe_act"),
    ),
    "optimizer_offload_frac": (0.0, 0.0, 0.4, 1.0),
}


def drawn_layouts(seed: int, num_runs: int, num_layouts: int) -> list[RunConfig]:
    """Return layouts of some runs that may all run, as many of each."""
    rng = random.Random(seed)
    return [
        _layout(rng, run)
        for run in [_run(rng) for _ in range(num_runs)]
        for _ in range(num_layouts)
    ]


def _run(rng: random.Random) -> RunConfig:
    model = rng.choice(_MODELS)
    shape: ModelShape = replace(SMALL, num_layers=12, vocab_size=512, **model)
    engine = rng.choice((Engine.MEGATRON, Engine.MEGATRON, Engine.TORCH))
    comm = rng.choice((ContextComm.P2P, ContextComm.ALL_GATHER))
    return RunConfig(
        model=shape,
        parallelism=Parallelism(engine=engine, context_comm=comm),
        batch=Batch(micro_batch_size=1, global_batch_size=96),
        **_some(rng, _RUNS),
    )


def _some(rng: random.Random, choices: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in choices.items()}


def _layout(rng: random.Random, run: RunConfig) -> RunConfig:
    """Return a layout of a run, drawn until one can run."""
    while True:
        degrees = _some(rng, _DEGREES)
        num_chunks = degrees["pp"] * degrees["vp"]
        if rng.random() < 0.5 and num_chunks > 1:
            cuts = sorted(rng.choices(range(13), k=num_chunks - 1))
            degrees["chunk_layers"] = tuple(
                end - begin for begin, end in zip((0, *cuts), (*cuts, 12), strict=True)
            )
        try:
            return replace(
                run,
                parallelism=replace(run.parallelism, **degrees),
                batch=replace(run.batch, micro_batch_size=rng.choice((1, 2, 3, 4))),
                **_some(rng, _AGAIN),
            )
        except ConfigError:
            continue


def changed_in_one_field(layouts: list[RunConfig]) -> list[RunConfig]:
    """Return the first of some layouts, and it with each value of each field of the others, where
    it may run so: what is remembered by too few of its fields differs from what it is alone."""
    first = layouts[0]
    out = dict.fromkeys([first])
    for name in FIELDS:
        for value in dict.fromkeys(LayoutTable.of(layouts).column(name).values):
            try:
                out[_changed(first, name, value)] = None
            except ConfigError:
                continue
    return list(out)


def _changed(config: RunConfig, name: str, value: Any) -> RunConfig:
    for part in ("parallelism", "batch"):
        if name in {one.name for one in fields(getattr(config, part))}:
            return replace(config, **{part: replace(getattr(config, part), **{name: value})})
    return replace(config, **{name: value})
