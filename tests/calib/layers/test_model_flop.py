"""FLOP per token: against Megatron-LM's own function, and against what published tables say."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.benchmarks.published.model_shapes import public_shape
from forerun.calib.layers.model_size import model_flop_per_token
from forerun.calib.workload.config import Experts, LatentAttention, ModelShape

EXACT = 1e-12
"""Relative tolerance of sums of whole numbers below 2**53."""

GPT3_175B: dict[str, Any] = {
    **{"num_layers": 96, "hidden_size": 12288, "ffn_hidden_size": 49152},
    **{"num_attention_heads": 96, "kv_channels": 128, "seq_length": 2048, "vocab": 51200},
}
LLAMA3_70B: dict[str, Any] = {
    **{"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "swiglu": True},
    **{"num_attention_heads": 64, "num_query_groups": 8, "kv_channels": 128},
    **{"seq_length": 8192, "vocab": 128256},
}
MIXTRAL: dict[str, Any] = {
    **{"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "swiglu": True},
    **{"num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 128},
    **{"seq_length": 4096, "vocab": 32000, "num_experts": 8, "moe_router_topk": 2},
}
DEEPSEEK_V3: dict[str, Any] = {
    **{"num_layers": 61, "hidden_size": 7168, "ffn_hidden_size": 18432, "swiglu": True},
    **{"num_attention_heads": 128, "kv_channels": 128, "seq_length": 4096, "vocab": 129280},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128, "v_head_dim": 128},
    **{"qk_pos_emb_head_dim": 64, "num_experts": 256, "moe_router_topk": 8, "num_dense": 3},
    **{"moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048},
    **{"mtp_num_layers": 1},
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    **{"num_layers": 27, "hidden_size": 2048, "ffn_hidden_size": 10944, "swiglu": True},
    **{"num_attention_heads": 16, "kv_channels": 128, "seq_length": 4096, "vocab": 102400},
    **{"kv_lora_rank": 512, "qk_head_dim": 128, "v_head_dim": 128, "qk_pos_emb_head_dim": 64},
    **{"num_experts": 64, "moe_router_topk": 6, "num_dense": 1},
    **{"moe_ffn_hidden_size": 1408, "moe_shared_expert_intermediate_size": 2816},
}
QWEN3_30B: dict[str, Any] = {
    **{"num_layers": 48, "hidden_size": 2048, "ffn_hidden_size": 6144, "swiglu": True},
    **{"num_attention_heads": 32, "num_query_groups": 4, "kv_channels": 128},
    **{"seq_length": 4096, "vocab": 151936, "num_experts": 128, "moe_router_topk": 8},
    **{"moe_ffn_hidden_size": 768},
}
MEGATRON_FLOP = (
    (GPT3_175B, 2174868359479296),
    (LLAMA3_70B, 3680031058427904),
    (MIXTRAL, 326477644038144),
    (DEEPSEEK_V3, 1064931126411264),
    (DEEPSEEK_V2_LITE, 67117793673216),
    (QWEN3_30B, 94233729957888),
)
"""FLOP of one sequence, which ``num_floating_point_operations(args, 1)`` of Megatron-LM core 0.16.1
(megatron/training/training.py) returned for these arguments."""


def shape(given: dict[str, Any]) -> ModelShape:
    num_layers, num_dense = given["num_layers"], given.get("num_dense", 0)
    experts = latent = None
    if "num_experts" in given:
        experts = Experts(
            num_experts=given["num_experts"],
            top_k=given["moe_router_topk"],
            ffn_hidden_size=given.get("moe_ffn_hidden_size", given["ffn_hidden_size"]),
            shared_ffn_hidden_size=given.get("moe_shared_expert_intermediate_size", 0),
            layer_pattern=tuple(n >= num_dense for n in range(num_layers)) if num_dense else (),
        )
    if "kv_lora_rank" in given:
        names = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        latent = LatentAttention(
            q_lora_rank=given.get("q_lora_rank", 0), **{name: given[name] for name in names}
        )
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
    return ModelShape(
        **{name: given[name] for name in (*names, "kv_channels", "seq_length")},
        num_query_groups=given.get("num_query_groups", given["num_attention_heads"]),
        vocab_size=given["vocab"],
        is_gated=given.get("swiglu", False),
        num_prediction_layers=given.get("mtp_num_layers", 0),
        experts=experts,
        latent_attention=latent,
    )


def arguments(given: dict[str, Any]) -> SimpleNamespace:
    """The same as Megatron's arguments."""
    absent = ("num_experts", "mtp_num_layers", "q_lora_rank", "moe_ffn_hidden_size")
    absent = (*absent, "moe_shared_expert_intermediate_size", "hybrid_override_pattern")
    off = ("is_hybrid_model", "attention_output_gate", "swiglu")
    num_dense = given.get("num_dense", 0)
    return SimpleNamespace(
        **{
            **dict.fromkeys((*absent, "experimental_attention_variant", "num_query_groups")),
            **dict.fromkeys(off, False),
            **given,
            "padded_vocab_size": given["vocab"],
            "group_query_attention": "num_query_groups" in given,
            "multi_latent_attention": "kv_lora_rank" in given,
            "moe_layer_freq": [int(n >= num_dense) for n in range(given["num_layers"])],
        }
    )


@pytest.mark.parametrize(("given", "flop"), MEGATRON_FLOP)
def test_a_sequence_has_the_flop_that_megatron_counts(given: dict[str, Any], flop: int) -> None:
    result = model_flop_per_token(shape(given)) * given["seq_length"]
    assert result == pytest.approx(flop, rel=EXACT)


def test_gates_of_attention_are_a_product_as_wide_as_the_queries() -> None:
    plain = shape(MEGATRON_FLOP[0][0])
    queries = plain.num_attention_heads * plain.kv_channels
    more = model_flop_per_token(replace(plain, has_attention_gate=True))
    stated = 6 * plain.num_layers * plain.hidden_size * queries
    assert more - model_flop_per_token(plain) == pytest.approx(stated, rel=EXACT)


@pytest.mark.parametrize("given", [given for given, _ in MEGATRON_FLOP])
def test_megatron_itself_says_so_where_it_is_installed(given: dict[str, Any]) -> None:
    training = pytest.importorskip("megatron.training.training")
    flop = training.num_floating_point_operations(arguments(given), 1)
    assert model_flop_per_token(shape(given)) * given["seq_length"] == pytest.approx(flop, rel=1e-6)


# Tokens per second and TFLOP/s of one GPU, as Megatron-Bridge publishes them side by side
# (docs/performance-summary-archive.md, releases 25.09 to 26.02.01); both are whole numbers there.
@pytest.mark.parametrize(
    ("name", "seq_length", "num_ahead", "tokens_per_s", "tera_flop_per_s"),
    [
        ("LLAMA3_8B", 8192, 0, 14079, 725),
        ("LLAMA3_70B", 8192, 0, 3837, 1724),
        ("LLAMA3.1_405B", 8192, 0, 302, 763),
        ("Qwen3_30B_a3B", 4096, 0, 5275, 121),
        ("Qwen3_235B_a22B", 4096, 0, 1575, 233),
        ("Kimi_K2", 4096, 0, 5072, 1037),
        ("DeepSeekV3 (w/o MTP)", 4096, 0, 4018, 1003),
        ("DeepSeekV3 (w/ MTP)", 4096, 1, 2139, 557),
    ],
)
def test_published_rates_are_told_in_the_same_unit(
    name: str, seq_length: int, num_ahead: int, tokens_per_s: int, tera_flop_per_s: int
) -> None:
    shape = public_shape(name, seq_length=seq_length)
    per_token = model_flop_per_token(replace(shape, num_prediction_layers=num_ahead))
    assert tokens_per_s * per_token / 1e12 == pytest.approx(tera_flop_per_s, rel=5e-3)


def test_query_groups_and_experts_change_what_they_are_part_of() -> None:
    dense = shape(LLAMA3_70B)
    fewer = model_flop_per_token(replace(dense, num_query_groups=4))
    keys = 2 * 3 * 2 * 80 * 8192 * 128 * 4
    assert model_flop_per_token(dense) - fewer == pytest.approx(keys)
    # One expert of the same width, of any number, is the dense layer.
    single = Experts(num_experts=64, top_k=1, ffn_hidden_size=dense.ffn_hidden_size)
    assert model_flop_per_token(replace(dense, experts=single)) == model_flop_per_token(dense)


def test_attention_alone_grows_with_the_length() -> None:
    short = shape(LLAMA3_70B)
    long = replace(short, seq_length=2 * short.seq_length)
    # Causal: 12 x layers x queries x length / 2, half of PaLM's.
    grown = 6 * 80 * 8192 * 8192
    assert model_flop_per_token(long) - model_flop_per_token(short) == pytest.approx(grown)
