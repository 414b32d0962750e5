"""Shapes of public models by name, for tables that name a model without sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from forerun.calib.errors import ConfigError
from forerun.calib.workload.model_shape import (
    Dispatcher,
    Experts,
    LatentAttention,
    ModelShape,
    Normalization,
    PositionEmbedding,
)


def public_shape(
    name: str, *, seq_length: int, num_layers: int = 0, num_dense_layers: int | None = None
) -> ModelShape:
    """Return the shape of a model by its name in tables; raise ``ConfigError`` if unknown.

    ``num_layers`` truncates the depth (0: full).  The first layers of a model with experts stay
    dense as published, or as many as ``num_dense_layers``.

    >>> public_shape("LLAMA3.1_405B", seq_length=8192).num_layers
    126
    >>> public_shape("DeepSeekV3 (w/o MTP)", seq_length=4096).experts.num_experts
    256
    """
    key = model_key(name)
    depth = num_layers or _models()[key].num_layers
    dense = _DENSE_LAYERS.get(key, 0) if num_dense_layers is None else num_dense_layers
    return _cut(key, depth, seq_length, dense)


def model_key(name: str) -> str:
    """Return our name of a model; raise ``ConfigError`` if unknown.

    >>> model_key("Qwen3_235B_a22B (tokendrop)"), model_key("Llama 3.1 70b")
    ('qwen3-235b-a22b', 'llama3-70b')
    """
    low = re.sub(r"[^a-z0-9]", "", name.lower())
    for pattern, reason in _NOT_MODELLED.items():
        if re.search(pattern, low):
            raise ConfigError(f"model {name!r} has {reason}; give a transformer")
    for pattern, key in _PATTERNS.items():
        if re.search(pattern, low):
            return key
    raise ConfigError(f"model {name!r} is not known; known are {', '.join(_models())}")


_NOT_MODELLED = {
    "nemotron3nano|nemotronh|nemotron5": "Mamba layers, which are not modelled",
    "qwen3next": "linear attention, which is not modelled",
    "stablediffusion|flux|dit|paligemma|llava|qwen.*vl": "parts other than text, not modelled",
}
_PATTERNS = {
    "deepseekv?3": "deepseek-v3",
    "deepseekv?2lite": "deepseek-v2-lite",
    "deepseekv?2": "deepseek-v2",
    "kimik2|kimi1t": "kimi-k2",
    "qwen3.*235b": "qwen3-235b-a22b",
    "qwen3.*30b": "qwen3-30b-a3b",
    "gptoss120b": "gpt-oss-120b",
    "gptoss20b": "gpt-oss-20b",
    "mixtral8x22b": "mixtral-8x22b",
    "mixtral8x7b|mixtral": "mixtral-8x7b",
    "grok1": "grok-1",
    "llama3.*405b": "llama3-405b",
    "llama3.*70b": "llama3-70b",
    "llama3.*8b": "llama3-8b",
    "llama2.*70b": "llama2-70b",
    "llama2.*13b": "llama2-13b",
    "llama2.*7b": "llama2-7b",
    "nemotron.*340b": "nemotron4-340b",
    "nemotron.*15b": "nemotron4-15b",
    "internlm7b": "internlm-7b",
    "gpt3$|gpt3.*175b|gpt175b": "gpt3-175b",
}
_DENSE_LAYERS = {"deepseek-v2": 1, "deepseek-v2-lite": 1, "deepseek-v3": 3, "kimi-k2": 1}
_MLA = LatentAttention(q_lora_rank=1536, kv_lora_rank=512)


@lru_cache(maxsize=1024)
def _cut(key: str, num_layers: int, seq_length: int, num_dense: int) -> ModelShape:
    shape = _models()[key]
    experts = shape.experts
    if experts is not None and num_dense:
        pattern = tuple(layer >= num_dense for layer in range(num_layers))
        experts = replace(experts, layer_pattern=pattern)
    return replace(shape, num_layers=num_layers, seq_length=seq_length, experts=experts)


_GPT: Mapping[str, Any] = {
    "is_gated": False,
    "has_bias": True,
    "is_tied": True,
    "normalization": Normalization.LAYER_NORM,
    "position_embedding": PositionEmbedding.LEARNED,
}
_NEMOTRON: Mapping[str, Any] = {"is_gated": False, "normalization": Normalization.LAYER_NORM}
_QWEN3: Mapping[str, Any] = {"kv_channels": 128, "has_qk_norm": True}
_GPT_OSS: Mapping[str, Any] = {"kv_channels": 64, "has_bias": True}
_LATENT: Mapping[str, Any] = {
    "kv_channels": _MLA.v_head_dim,
    "latent_attention": _MLA,
    "has_qk_norm": True,
}
_LITE: Mapping[str, Any] = _LATENT | {"latent_attention": replace(_MLA, q_lora_rank=0)}


@lru_cache(maxsize=1)
def _models() -> Mapping[str, ModelShape]:
    """Return shapes of layers, hidden, ffn, heads, groups, vocabulary; experts, top-k, ffn, shared.

    The default is a decoder without biases: rotary positions, RMSNorm, gated, untied output.
    """
    return {
        # Llama team 2024, arXiv:2407.21783, Table 3
        "llama3-8b": _model("32 4096 14336 32 8 128256"),
        "llama3-70b": _model("80 8192 28672 64 8 128256"),
        "llama3-405b": _model("126 16384 53248 128 8 128256"),
        # Touvron et al. 2023, arXiv:2307.09288, and the released configuration
        "llama2-7b": _model("32 4096 11008 32 32 32000"),
        "llama2-13b": _model("40 5120 13824 40 40 32000"),
        "llama2-70b": _model("80 8192 28672 64 8 32000"),
        # released configuration, 2023
        "internlm-7b": _model("32 4096 11008 32 32 103168"),
        # Brown et al. 2020, arXiv:2005.14165, Table 2.1
        "gpt3-175b": _model("96 12288 49152 96 96 51200", **_GPT),
        # Parmar et al. 2024, arXiv:2402.16819, Table 1
        "nemotron4-15b": _model("32 6144 24576 48 8 256000", **_NEMOTRON),
        # NVIDIA 2024, arXiv:2406.11704, Table 1
        "nemotron4-340b": _model("96 18432 73728 96 8 256000", **_NEMOTRON),
        # Jiang et al. 2024, arXiv:2401.04088, Table 1
        "mixtral-8x7b": _model("32 4096 14336 32 8 32000", "8 2 14336 0"),
        # released configurations, 2024
        "mixtral-8x22b": _model("56 6144 16384 48 8 32768", "8 2 16384 0"),
        "grok-1": _model("64 6144 32768 48 8 131072", "8 2 32768 0"),
        # Qwen team 2025, arXiv:2505.09388, Table 2, and the released configuration
        "qwen3-30b-a3b": _model("48 2048 768 32 4 151936", "128 8 768 0", **_QWEN3),
        "qwen3-235b-a22b": _model("94 4096 1536 64 4 151936", "128 8 1536 0", **_QWEN3),
        # OpenAI 2025, arXiv:2508.10925, Table 1, and the released configuration
        "gpt-oss-120b": _model("36 2880 2880 64 8 201088", "128 4 2880 0", **_GPT_OSS),
        "gpt-oss-20b": _model("24 2880 2880 64 8 201088", "32 4 2880 0", **_GPT_OSS),
        # arXiv:2405.04434, 3.1.2 and appendix B
        "deepseek-v2": _model("60 5120 12288 128 128 102400", "160 6 1536 3072", **_LATENT),
        "deepseek-v2-lite": _model("27 2048 10944 16 16 102400", "64 6 1408 2816", **_LITE),
        # arXiv:2412.19437, 4.2
        "deepseek-v3": _model("61 7168 18432 128 128 129280", "256 8 2048 2048", **_LATENT),
        # arXiv:2507.20534, Table 2
        "kimi-k2": _model("61 7168 18432 64 64 163840", "384 8 2048 2048", **_LATENT),
    }


def _model(sizes: str, experts: str = "", **changed: Any) -> ModelShape:
    layers, hidden, ffn, heads, groups, vocab = map(int, sizes.split())
    usual = {
        "kv_channels": hidden // heads,
        "is_gated": True,
        "has_bias": False,
        "is_tied": False,
        "normalization": Normalization.RMS_NORM,
        "position_embedding": PositionEmbedding.ROPE,
    }
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        seq_length=1,
        vocab_size=vocab,
        experts=_experts(*map(int, experts.split())) if experts else None,
        **(usual | changed),
    )


def _experts(number: int, top_k: int, ffn: int, shared: int) -> Experts:
    return Experts(
        num_experts=number,
        top_k=top_k,
        ffn_hidden_size=ffn,
        shared_ffn_hidden_size=shared,
        dispatcher=Dispatcher.ALL_TO_ALL,
        is_grouped=True,
    )
