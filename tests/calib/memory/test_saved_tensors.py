"""Bytes that autograd really retains of a layer of megatron.core, against ``activations``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from one_layer import layer_activations

from forerun.calib.layers.blocks import BlockKind
from forerun.calib.workload.config import (
    Attention,
    Dispatcher,
    Experts,
    LatentAttention,
    Normalization,
    PositionEmbedding,
    Precision,
    Recompute,
    RunConfig,
)

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")

Layout = Callable[..., RunConfig]
PROBE = Path(__file__).with_name("saved_tensors_probe.py")
EXPERTS = Experts(num_experts=4, top_k=2, ffn_hidden_size=96, dispatcher=Dispatcher.ALL_TO_ALL)
DENSE_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": Precision.BF16},
    "rope": {"model": {"position_embedding": PositionEmbedding.ROPE}},
    "grouped queries": {"model": {"num_query_groups": 2}},
    "gated": {"model": {"is_gated": True, "has_bias": False}},
    "rms norm": {"model": {"normalization": Normalization.RMS_NORM}},
    "full recompute": {"recompute": Recompute.FULL},
    "selective recompute": {"recompute": Recompute.SELECTIVE},
    "mlp recompute": {"recompute": Recompute.SELECTIVE, "recompute_modules": ("mlp",)},
    "fused attention": {"attention": Attention.FUSED},
    "attention gate": {"model": {"has_attention_gate": True}, "precision": Precision.BF16},
    "fused attention, gate": {
        "model": {"has_attention_gate": True},
        "attention": Attention.FUSED,
    },
    "tp 2": {"tp": 2},
    "tp 2, split tokens": {"tp": 2, "par": {"is_sequence_parallel": True}},
}
LATENT = LatentAttention(
    q_lora_rank=32, kv_lora_rank=24, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=24
)
LATENT_CASES: dict[str, dict[str, Any]] = {
    "both latent": {},
    "whole queries": {"latent": {"q_lora_rank": 0}},
    "tp 2": {"tp": 2, "par": {"is_sequence_parallel": True}},
}
"""Latent attention (DeepSeek-V2) with attention itself in one kernel, which on a CPU wants heads of
one width: their values are as wide as their queries."""
EXPERT_CASES: tuple[dict[str, Any], ...] = (
    {},
    {"shared_ffn_hidden_size": 64},
    {"num_experts": 8, "top_k": 3},
)
SHAPE = {"seq_length": 128, "hidden_size": 64}


def dense_configs(layout: Layout) -> list[RunConfig]:
    return [
        layout(**{**case, "model": {**SHAPE, **case.get("model", {})}})
        for case in DENSE_CASES.values()
    ]


def expert_configs(layout: Layout) -> list[RunConfig]:
    gated = {**SHAPE, "is_gated": True, "has_bias": False}
    return [layout(model={**gated, "experts": replace(EXPERTS, **case)}) for case in EXPERT_CASES]


def latent_configs(layout: Layout) -> list[RunConfig]:
    shape = {**SHAPE, "is_gated": True, "has_bias": False, "has_qk_norm": True}
    shape["position_embedding"] = PositionEmbedding.ROPE
    out = []
    for case in LATENT_CASES.values():
        latent = replace(LATENT, **case.get("latent", {}))
        split = {name: value for name, value in case.items() if name != "latent"}
        model = {**shape, "latent_attention": latent}
        out.append(layout(model=model, attention=Attention.FUSED, **split))
    return out


@pytest.fixture
def saved_nbytes(layout: Layout) -> dict[RunConfig, int]:
    """Bytes that Megatron keeps of a layer of each config."""
    configs = (*dense_configs(layout), *expert_configs(layout), *latent_configs(layout))
    return dict(zip(configs, measured(configs), strict=True))


@cache
def measured(configs: tuple[RunConfig, ...]) -> list[int]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            str(PROBE),
            json.dumps([config.to_json() for config in configs]),
        ],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(x for x in done.stdout.splitlines() if x.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))


def extra_nbytes(config: RunConfig) -> int:
    """Return bytes that torch retains on the CPU for want of fused kernels; no layout has them.

    Normalised inputs of both RMSNorms; cosines and sines that queries and keys are rotated by.
    """
    model = config.model
    if config.recompute is Recompute.FULL:
        return 0
    tokens = config.batch.micro_batch_size * model.seq_length
    is_rms = model.normalization is Normalization.RMS_NORM
    is_rotated = model.position_embedding is PositionEmbedding.ROPE
    return 2 * 4 * tokens * model.hidden_size * is_rms + (
        4 * 4 * model.seq_length * model.kv_channels * is_rotated
    )


@pytest.mark.slow
def test_a_dense_layer_keeps_what_is_counted(
    layout: Layout, saved_nbytes: dict[RunConfig, int]
) -> None:
    for name, config in zip(DENSE_CASES, dense_configs(layout), strict=True):
        layer = layer_activations(config, BlockKind.LAYER)
        is_full = config.recompute is Recompute.FULL
        counted = layer.input_nbytes if is_full else layer.saved_nbytes
        # Norm statistics are of two bytes in bf16 here; a checkpoint keeps an element of its own.
        assert saved_nbytes[config] == pytest.approx(counted + extra_nbytes(config), rel=2e-3), name


@pytest.mark.slow
def test_latent_attention_keeps_what_is_counted(
    layout: Layout, saved_nbytes: dict[RunConfig, int]
) -> None:
    for name, config in zip(LATENT_CASES, latent_configs(layout), strict=True):
        latent, size = config.model.latent_attention, config.model.seq_length
        assert latent is not None
        # Cosines and sines of the unfused rotation, three of each, which TE's kernel makes anew.
        rotation = 6 * 4 * size * latent.qk_pos_emb_head_dim
        counted = layer_activations(config, BlockKind.LAYER).saved_nbytes
        # Over tp the rotated part of the keys is kept gathered: 1.4 % of so small a layer.
        assert saved_nbytes[config] == pytest.approx(counted + rotation, rel=2e-2), name


@pytest.mark.slow
def test_an_expert_layer_keeps_what_is_counted(
    layout: Layout, saved_nbytes: dict[RunConfig, int]
) -> None:
    for config in expert_configs(layout):
        counted = layer_activations(config, BlockKind.EXPERT_LAYER).saved_nbytes
        # The maps of the router are those of Transformer Engine: up to 1 % of so small a layer.
        assert saved_nbytes[config] == pytest.approx(counted, rel=1e-2)
