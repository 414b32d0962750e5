"""Multi-token prediction against real megatron.core and published sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from stage_tensors import parameters

from forerun.benchmarks.published.model_shapes import public_shape
from forerun.calib.layers.blocks import BlockKind, chunk_blocks
from forerun.calib.layers.stage_work import stage_operators
from forerun.calib.workload.config import (
    Batch,
    Dispatcher,
    Experts,
    LatentAttention,
    Parallelism,
    Precision,
    Recompute,
    RunConfig,
)
from forerun.calib.workload.operators import OperatorKind

ONE, TWO = {"num_prediction_layers": 1}, {"num_prediction_layers": 2}
EXCHANGE = Experts(
    num_experts=8,
    top_k=2,
    ffn_hidden_size=32,
    dispatcher=Dispatcher.ALL_TO_ALL,
    imbalance=1.0,
)
SEQUENCE = {"is_sequence_parallel": True}
DIST = {"is_optimizer_distributed": True}
needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed"
)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "one rank": (ONE, {}, 0),
    "two layers, last of pp 2": (TWO, {"tp": 2, "pp": 2, "par": SEQUENCE}, 3),
    "tp without sequence parallelism": (ONE, {"tp": 2}, 0),
    "first of pp 2": (ONE, {"pp": 2, "dp": 2, "par": DIST}, 0),
    "tied, last of pp 2": ({**ONE, "is_tied": True}, {"tp": 2, "pp": 2, "dp": 2, "par": DIST}, 7),
    "experts, recomputed": (
        {**ONE, "experts": EXCHANGE},
        {"dp": 2, "par": {"ep": 2}, "recompute": Recompute.FULL},
        0,
    ),
}


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_rank_is_that_of_megatron(
    name: str, llama: Callable[..., RunConfig], assert_as_megatron: Callable[..., None]
) -> None:
    model, settings, rank = CASES[name]
    assert_as_megatron(llama(model=model, **settings), rank)


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize("rank", [1023, 128], ids=["last stage", "second stage"])
def test_a_rank_of_1024_with_everything_is_that_of_megatron(
    rank: int, llama: Callable[..., RunConfig], assert_as_megatron: Callable[..., None]
) -> None:
    """DeepSeek-V3's layout with narrow layers: latent attention, 256 experts, one prediction."""
    experts = replace(
        EXCHANGE,
        num_experts=256,
        top_k=8,
        ffn_hidden_size=16,
        shared_ffn_hidden_size=16,
        has_fp32_router=True,
        layer_pattern=(False,) * 3 + (True,) * 13,
    )
    latent = LatentAttention(
        q_lora_rank=24, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16
    )
    model = {"num_layers": 16, "seq_length": 64, "has_qk_norm": True, **ONE}
    config = llama(
        model={**model, "experts": experts, "latent_attention": latent},
        **{"tp": 2, "pp": 8, "dp": 64, "micro": 1, "samples": 512, "precision": Precision.BF16},
        par={"ep": 64, "etp": 1, **SEQUENCE, **DIST},
    )
    assert config.parallelism.num_ranks == 1024
    assert_as_megatron(config, rank)


def test_the_last_chunk_ends_with_norm_predictions_and_head(
    llama: Callable[..., RunConfig],
) -> None:
    config = llama(model=TWO, pp=2)
    kinds = [block.kind for block, _ in chunk_blocks(config, 1)]
    assert kinds == [
        BlockKind.EMBEDDING_COPY,
        BlockKind.LAYER,
        BlockKind.PREDICTION,
        BlockKind.HEAD,
    ]
    assert [block.kind for block, _ in chunk_blocks(config, 0)] == [
        BlockKind.EMBEDDING,
        BlockKind.LAYER,
    ]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_logits_losses_and_look_ups_come_once_more_for_each(
    number: int, llama: Callable[..., RunConfig]
) -> None:
    config = llama(model={"num_prediction_layers": number})
    counts = {o.kind: n for o, n in stage_operators(config, 0).forward}
    for kind in (OperatorKind.LOGITS, OperatorKind.LOSS, OperatorKind.EMBEDDING):
        assert counts[kind] == 1 + number
    assert counts[OperatorKind.LINEAR_QKV] == config.model.num_layers + number


def test_the_module_of_deepseek_v3_has_its_published_parameters() -> None:
    """11.5 billion of its own, embedding and output head not counted (released weights)."""
    shape = public_shape("DeepSeek V3", seq_length=1)
    batch = Batch(micro_batch_size=1, global_batch_size=1)

    def size(number: int) -> int:
        model = replace(shape, num_prediction_layers=number)
        return parameters(RunConfig(model=model, parallelism=Parallelism(), batch=batch), 0)

    assert (size(1) - size(0)) / 1e9 == pytest.approx(11.5, rel=1e-2)
