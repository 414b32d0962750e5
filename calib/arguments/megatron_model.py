"""Model shape of Megatron's arguments, by the rules of core_v0.16.1."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from ..workload import (
    Arguments,
    AttentionWindow,
    Dispatcher,
    Experts,
    LatentAttention,
    ModelShape,
    Normalization,
    PositionEmbedding,
    at_least_one,
    decode,
    option_of,
    shown,
    whole,
)
from .hybrid_pattern import HybridPattern, opaque_layers
from .megatron_options import EXPERT_SWITCHES

NUM_EXPERTS = ("num_experts", "num_moe_experts")
"""Name of Megatron's argument, and of the field in its ``TransformerConfig``."""
_GATED = ("swiglu", "gated_linear_unit", "quick_geglu")
# Vocabulary size of GPT-2 as published, so that its file need not be read.
_GPT2_VOCAB = 50257
_TIKTOKEN_VOCAB = 1 << 17
_FAMILIES = tuple(
    (re.compile(name, re.IGNORECASE), size)
    for name, size in (
        (r"qwen-?[23]", 151_936),
        (r"llama-?3", 128_256),
        (r"mistral-7b[\w-]*v0\.3", 32_768),
        (r"llama-?2|mistral-7b|mixtral-8x7b", 32_000),
        (r"deepseek-(v3|r1)", 129_280),
        (r"deepseek-v2", 102_400),
        (r"gpt-oss", 201_088),
        (r"nemotron\w*_256k", 256_000),
    )
)
"""Rows of the embedding, by pattern of the tokenizer's path: ``vocab_size`` of each model's
published config.json; Nemotron-4 from arXiv:2402.16819, table 1."""
# Ten times the layers that MOST allows; [1]*10**9 must not fill the memory.
_MAX_LAYERS = 100_000


def model_shape(given: Arguments, tp: int, pattern: HybridPattern | None = None) -> ModelShape:
    """Return the model of Megatron's arguments; the vocabulary is padded for ``tp``.

    ``pattern``: of a hybrid model.  Raise ``ConfigError`` if a size without a default is missing.
    """
    hidden, heads = given.required("hidden_size"), given.required("num_attention_heads")
    at_least_one("num_attention_heads", heads)
    if not given.number("kv_channels") and hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; "
            f"give --kv-channels"
        )
    ffn = given.number("ffn_hidden_size") or default_ffn(hidden, given.is_on("swiglu"))
    has_bias = given.is_on("add_bias_linear", default=True)
    is_latent = given.is_on("multi_latent_attention")
    num_layers = given.number("num_layers", "encoder_num_layers") or given.required("num_layers")
    is_grouped = given.is_on("group_query_attention") and not is_latent
    return ModelShape(
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=given.number("num_query_groups", default=1) if is_grouped else heads,
        kv_channels=given.number("kv_channels") or hidden // heads,
        seq_length=given.number("seq_length", "encoder_seq_length") or given.required("seq_length"),
        vocab_size=_vocab_size(given, tp),
        is_gated=any(given.is_on(name) for name in _GATED),
        has_bias=has_bias,
        has_qkv_bias=given.is_on("add_qkv_bias") and not has_bias,
        has_qk_norm=given.is_on("qk_layernorm"),
        has_attention_gate=given.is_on("attention_output_gate") and not is_latent,
        is_tied=not given.is_on("untie_embeddings_and_output_weights"),
        normalization=decode(
            Normalization, given.text("normalization", default=Normalization.LAYER_NORM.value)
        ),
        position_embedding=_position_embedding(given),
        max_position_embeddings=given.number("max_position_embeddings"),
        experts=_experts(given, ffn, num_layers),
        latent_attention=_latent_attention(given) if is_latent else None,
        window=_window(given, num_layers),
        num_prediction_layers=given.number("mtp_num_layers"),
        layer_kinds=pattern.layer_kinds if pattern else "",
        prediction_kinds=pattern.prediction_kinds if pattern else "",
        opaque_layers=opaque_layers(given, pattern) if pattern else (),
    )


def default_ffn(hidden: int, is_swiglu: bool) -> int:
    """Return 4 x hidden; with SwiGLU 2/3 of it, rounded down to 64 (``validate_args``)."""
    return int((4 * hidden * 2 / 3) / 64) * 64 if is_swiglu else 4 * hidden


def _position_embedding(given: Arguments) -> PositionEmbedding:
    if given.is_on("use_rotary_position_embeddings"):
        return PositionEmbedding.ROPE
    kind = given.text("position_embedding_type", default=PositionEmbedding.LEARNED.value)
    known = [p.value for p in PositionEmbedding]
    # Megatron's other kinds (yarn, mrope, relative) have no trained table either.
    return PositionEmbedding(kind) if kind in known else PositionEmbedding.ROPE


def usual_vocab_size(given: Arguments) -> int:
    """Return the vocabulary size that a tokenizer's name implies; 0 if unknown.

    Known are GPT-2's BPE, the only one with a merge file, Megatron's default for tiktoken
    (core/tokenizers/text/libraries/tiktoken_tokenizer.py, DEFAULT_TIKTOKEN_MAX_VOCAB), and
    published model families whose name is in the tokenizer's path.
    """
    tokenizer = given.text("tokenizer_type")
    if tokenizer == "TikTokenizer":
        return _TIKTOKEN_VOCAB
    is_gpt2 = tokenizer == "GPT2BPETokenizer" or (not tokenizer and given.text("merge_file"))
    if is_gpt2:
        return _GPT2_VOCAB
    path = given.text("tokenizer_model")
    return next((size for name, size in _FAMILIES if path and name.search(path)), 0)


def _vocab_size(given: Arguments, tp: int) -> int:
    """Return the rows of the embedding, padded to ``make_vocab_size_divisible_by`` x tp."""
    padded = given.number("padded_vocab_size")
    if padded:
        return padded
    tokenizer = given.text("tokenizer_type")
    size = given.number("vocab_size")
    if not size:
        size = usual_vocab_size(given)
    if not size:
        raise ConfigError(
            "vocab_size is missing, and the tokenizer's file is not read; give --vocab-size"
        )
    # The null tokenizer adds an end-of-document token to the given size.
    size += tokenizer == "NullTokenizer"
    multiple = given.number("make_vocab_size_divisible_by", default=128) * tp
    return -(-size // multiple) * multiple


def _experts(given: Arguments, ffn: int, num_layers: int) -> Experts | None:
    num_experts = given.number(*NUM_EXPERTS)
    if not num_experts:
        return None
    freq = given.get("moe_layer_freq")
    capacity = given.real("moe_expert_capacity_factor")
    dispatcher = given.text("moe_token_dispatcher_type", default=Dispatcher.ALL_GATHER.value)
    switches: dict[str, Any] = {field: given.is_on(name) for field, name in EXPERT_SWITCHES.items()}
    return Experts(
        num_experts=num_experts,
        top_k=given.number("moe_router_topk", default=2),
        ffn_hidden_size=given.number("moe_ffn_hidden_size") or ffn,
        shared_ffn_hidden_size=given.number("moe_shared_expert_intermediate_size"),
        layer_pattern=expert_layers(1 if freq is None else freq, num_layers),
        # Core 0.6 to 0.11 had a second dispatcher with the suffix _seq.
        dispatcher=decode(Dispatcher, dispatcher.removesuffix("_seq")),
        capacity_factor=max(capacity, 0.0),
        rank_capacity_factor=(
            rank_capacity := max(given.real("moe_expert_rank_capacity_factor"), 0.0)
        ),
        stash_factor=_stash_factor(given) if rank_capacity else 0.0,
        has_fp32_router=given.get("moe_router_dtype") is not None,
        **switches,
    )


def _stash_factor(given: Arguments) -> float:
    """Return the stash factor, 1.10 by default; of a negative one, its absolute value."""
    if not given.is_on("moe_paged_stash"):
        return 0.0
    return abs(given.real("moe_paged_stash_buffer_size_factor_cuda")) or 1.1


def _latent_attention(given: Arguments) -> LatentAttention:
    default = LatentAttention()
    names = LatentAttention.__dataclass_fields__
    return LatentAttention(
        **{name: given.number(name, default=getattr(default, name)) for name in names}
    )


def _window(given: Arguments, num_layers: int) -> AttentionWindow | None:
    """Return the window of ``--window-size``: keys before and after a query, -1 for all; causal
    attention has none after (``is_layer_window_attention`` of ``core/transformer/utils.py``)."""
    words = given.words("window_size")
    sizes = [word for one in words for word in one.strip("()[] ").split(",") if word.strip()]
    if not sizes:
        return None
    before = whole("window_size", sizes[0])
    if before < 0:
        return None
    freq = given.get("window_attn_skip_freq")
    layers: tuple[bool, ...] = ()
    if freq is not None:
        layers = _flags(
            "window_attn_skip_freq", freq, num_layers, lambda layer, step: (layer + 1) % step != 0
        )
    return AttentionWindow(width=before + 1, layers=layers) if any(layers or (True,)) else None


def expert_layers(freq: object, num_layers: int) -> tuple[bool, ...]:
    """Return one flag per layer, first to last, True with experts; empty if all have them.

    A number N puts experts in the layers 0, N, 2N, ..., whatever its sign (``layer % N == 0``).  An
    expression such as ``([0]*3+[1]*58)`` may contain whole numbers, lists, ``+`` and ``*``, and
    nothing else is evaluated.  Raise ``ConfigError`` for any other expression.

    >>> expert_layers("[0]*1+[1]*2", 3)
    (False, True, True)
    """
    return _flags("moe_layer_freq", freq, num_layers, lambda layer, step: layer % step == 0)


def _flags(
    name: str, freq: object, num_layers: int, is_set: Callable[[int, int], bool]
) -> tuple[bool, ...]:
    """Return one flag per layer, those of a list or of ``is_set(layer, number)``; empty if all are
    set."""
    value = _evaluated(name, freq) if isinstance(freq, str) else freq
    if isinstance(value, list | tuple):
        flags = tuple(bool(int(v)) for v in value)
    elif isinstance(value, int) and value:
        flags = tuple(is_set(layer, value) for layer in range(num_layers))
    else:
        raise ConfigError(
            f"{option_of(name)} {shown(freq)} is neither a whole number but 0 nor a list; give "
            f"one, such as 2 or [0]*3+[1]*58"
        )
    return () if all(flags) and len(flags) == num_layers else flags


def _evaluated(name: str, text: str) -> Any:
    try:
        is_number = text.strip().removeprefix("-").isdecimal()
        return int(text) if is_number else _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError) as err:
        raise ConfigError(
            f"{option_of(name)} {shown(text)} is not made of numbers, lists, + and *; "
            f"write it as [0]*3+[1]*58"
        ) from err


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if _size(left) * _size(right) > _MAX_LAYERS:
            raise ValueError("too many layers")
        return left * right
    raise ValueError(ast.dump(node))


def _size(value: Any) -> int:
    return len(value) if isinstance(value, list) else abs(value)
