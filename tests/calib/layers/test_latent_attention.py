"""Multi-latent attention against real megatron.core and closed forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from forerun.calib.fit.laws import work
from forerun.calib.layers.blocks import BlockKind, block
from forerun.calib.workload.config import LatentAttention, Recompute, RunConfig
from forerun.calib.workload.operators import OperatorKind

LATENT = LatentAttention(
    q_lora_rank=24, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16
)
DIRECT = replace(LATENT, q_lora_rank=0)
SEQUENCE = {"is_sequence_parallel": True}
DIST = {"is_optimizer_distributed": True}
needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed"
)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "one rank": ({"latent_attention": LATENT, "has_qk_norm": True}, {}, 0),
    "direct queries": ({"latent_attention": DIRECT}, {"dp": 2, "par": DIST}, 1),
    "values of another width": (
        {"latent_attention": replace(LATENT, v_head_dim=32), "has_qk_norm": True},
        {},
        0,
    ),
    "tp 2": ({"latent_attention": LATENT}, {"tp": 2}, 1),
    "tp 2, sequence parallel": (
        {"latent_attention": LATENT, "has_qk_norm": True},
        {"tp": 2, "par": SEQUENCE},
        0,
    ),
    "tp 2, sequence parallel, direct queries": (
        {"latent_attention": DIRECT, "has_qk_norm": True},
        {"tp": 2, "dp": 2, "par": {**SEQUENCE, **DIST}},
        3,
    ),
    "tp 4 of a pipeline": (
        {"latent_attention": LATENT, "has_qk_norm": True},
        {"tp": 4, "pp": 2, "par": SEQUENCE, "recompute": Recompute.FULL},
        5,
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
def test_up_projections_run_again_as_in_megatron(
    llama: Callable[..., RunConfig], assert_as_megatron: Callable[..., None]
) -> None:
    """The positions are computed again outside of any module, where the hooks do not see them."""
    config = llama(
        model={"latent_attention": LATENT},
        tp=2,
        par=SEQUENCE,
        recompute=Recompute.SELECTIVE,
        recompute_modules=("mla_up_proj",),
    )
    assert_as_megatron(config, 0, [("position", "recompute", (64, 3 * 8))])


def test_core_attention_has_the_products_of_both_widths(llama: Callable[..., RunConfig]) -> None:
    config = llama(model={"latent_attention": replace(LATENT, v_head_dim=32)})
    result = block(config, BlockKind.LAYER)
    (core,) = [o for o, _ in result.forward if o.kind is OperatorKind.CORE_ATTENTION]
    micro, heads, seq = 2, 4, 32
    assert work(core).flop == 2 * micro * heads * seq**2 * ((16 + 8) + 32)


def test_a_layer_has_the_parameters_of_the_report(llama: Callable[..., RunConfig]) -> None:
    """DeepSeek-AI 2024 (V2), equations 9 to 15 and 37 to 47, at the sizes of DeepSeek-V3."""
    latent = LatentAttention(q_lora_rank=1536, kv_lora_rank=512)
    model = {"hidden_size": 7168, "num_attention_heads": 128, "num_query_groups": 128}
    config = llama(model={**model, "latent_attention": latent, "has_qk_norm": True})
    number = sum(tensor.numel for tensor in block(config, BlockKind.LAYER).tensors)
    queries = 7168 * 1536 + 1536 + 1536 * 128 * (128 + 64)
    keys_values = 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    output, feed_forward, norms = 128 * 128 * 7168, 3 * 7168 * 128, 2 * 7168
    assert number == queries + keys_values + output + feed_forward + norms
