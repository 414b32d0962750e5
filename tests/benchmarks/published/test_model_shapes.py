"""Public shapes against the parameter counts that their authors publish."""

from __future__ import annotations

import pytest

from forerun.benchmarks.published.model_shapes import model_key, public_shape
from forerun.calib.errors import ConfigError
from forerun.calib.workload.config import ModelShape


def parameters(shape: ModelShape, *, active: bool = False) -> float:
    """Weights of products, embedding and output; norms and biases are below 0.1 %."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    latent = shape.latent_attention
    if latent is None:
        attention = 2 * hidden * shape.kv_channels * (heads + shape.num_query_groups)
    else:
        key = latent.qk_head_dim + latent.qk_pos_emb_head_dim
        low = latent.q_lora_rank
        attention = low * (hidden + heads * key) if low else hidden * heads * key
        attention += hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
        attention += latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim)
        attention += heads * latent.v_head_dim * hidden
    wide = hidden * (3 if shape.is_gated else 2)
    total = 0.0
    for layer in range(shape.num_layers):
        experts = shape.experts if shape.has_experts(layer) else None
        total += attention
        if experts is None:
            total += wide * shape.ffn_hidden_size
            continue
        count = experts.top_k if active else experts.num_experts
        total += wide * (count * experts.ffn_hidden_size + experts.shared_ffn_hidden_size)
        total += hidden * experts.num_experts
    return total + (1 if shape.is_tied else 2) * shape.vocab_size * hidden


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("LLAMA3_8B", 8.03),
        ("Llama 3.1 70b", 70.55),
        ("LLAMA3.1_405B", 405.85),
        ("Llama 2 7B", 6.74),
        ("Llama 2 13B", 13.02),
        ("Llama 2 70B", 68.98),
        ("GPT-3 175B", 174.6),
        ("Nemotron4 15b", 15.6),
        ("Nemotron4 340b", 341.0),
        ("Mixtral 8x7B", 46.7),
        ("Mixtral 8x22B", 140.6),
        ("Grok-1", 314.0),
        ("Qwen3_30B_a3B", 30.5),
        ("Qwen3_235B_a22B", 235.1),
        ("GPT OSS 120B", 116.8),
        ("gpt-oss-20b", 20.9),
        ("DeepSeek V2", 235.7),
        ("DeepSeek V2 Lite", 15.7),
        ("DeepSeekV3", 671.0),
        ("Kimi_K2", 1026.0),
    ],
)
def test_parameters_are_those_published(name: str, billions: float) -> None:
    value = parameters(public_shape(name, seq_length=4096)) / 1e9
    assert value == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("DeepSeekV3", 37.0), ("Kimi K2", 32.0), ("Qwen3 235B-A22B", 22.0), ("Qwen3_30B_a3B", 3.3)],
)
def test_active_parameters_are_those_published(name: str, billions: float) -> None:
    value = parameters(public_shape(name, seq_length=4096), active=True) / 1e9
    assert value == pytest.approx(billions, rel=0.05)


def test_cut_layers_keep_the_dense_ones_first() -> None:
    shape = public_shape("deepseek v3", seq_length=8, num_layers=5)
    assert [shape.has_experts(layer) for layer in range(5)] == [False] * 3 + [True] * 2


def test_what_is_no_transformer_says_so() -> None:
    with pytest.raises(ConfigError, match="Mamba"):
        model_key("Nemotron_3_Nano")
    with pytest.raises(ConfigError, match="not known"):
        model_key("Llama 4 Scout")
