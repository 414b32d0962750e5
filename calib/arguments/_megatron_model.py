"""Model shape of Megatron's arguments, by the rules of core_v0.16.1."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from ..errors import ConfigError
from ..workload.argument_fields import read_fields, written_fields
from ..workload.argument_values import Arguments, Values, option_of, shown, whole
from ..workload.config import RunConfig
from ..workload.model_shape import (
    AttentionWindow,
    Experts,
    LatentAttention,
    ModelShape,
    PositionEmbedding,
    at_least_one,
)
from ._hybrid_pattern import HybridPattern, opaque_layers
from ._megatron_settings import Setting

NUM_EXPERTS = ("num_experts", "num_moe_experts")
"""Name of Megatron's argument, and of the field in its ``TransformerConfig``."""
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
    fields = read_fields(ModelShape, given)
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    at_least_one("num_attention_heads", heads)
    if not fields["kv_channels"] and hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; "
            f"give --kv-channels"
        )
    ffn = fields["ffn_hidden_size"] or default_ffn(hidden, given.is_on("swiglu"))
    is_latent = given.is_on("multi_latent_attention")
    groups = heads if is_latent else fields.get("num_query_groups", heads)
    fields |= {
        "ffn_hidden_size": ffn,
        "num_query_groups": groups,
        "kv_channels": fields["kv_channels"] or hidden // heads,
        "vocab_size": _vocab_size(given, tp),
        "has_qkv_bias": fields["has_qkv_bias"] and not fields["has_bias"],
        "has_attention_gate": fields["has_attention_gate"] and not is_latent,
        "experts": _experts(given, ffn, fields["num_layers"]),
        "window": _window(given, fields["num_layers"]),
    }
    if is_latent:
        fields["latent_attention"] = LatentAttention(**read_fields(LatentAttention, given))
    if given.is_on("use_rotary_position_embeddings"):
        fields["position_embedding"] = PositionEmbedding.ROPE
    if pattern:
        fields["layer_kinds"] = pattern.layer_kinds
        fields["prediction_kinds"] = pattern.prediction_kinds
        fields["opaque_layers"] = opaque_layers(given, pattern)
    return ModelShape(**fields)


def default_ffn(hidden: int, is_swiglu: bool) -> int:
    """Return 4 x hidden; with SwiGLU 2/3 of it, rounded down to 64 (``validate_args``)."""
    return int((4 * hidden * 2 / 3) / 64) * 64 if is_swiglu else 4 * hidden


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
    if not given.number(*NUM_EXPERTS):
        return None
    fields, freq = read_fields(Experts, given), given.get("moe_layer_freq")
    rank_capacity = max(fields["rank_capacity_factor"], 0.0)
    fields |= {
        "ffn_hidden_size": fields["ffn_hidden_size"] or ffn,
        "layer_pattern": expert_layers(1 if freq is None else freq, num_layers),
        "capacity_factor": max(fields["capacity_factor"], 0.0),
        "rank_capacity_factor": rank_capacity,
        # The absolute value of a negative one counts.
        "stash_factor": abs(fields.get("stash_factor", 0.0)) if rank_capacity else 0.0,
        "has_fp32_router": given.get("moe_router_dtype") is not None,
    }
    return Experts(**fields)


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


def _model_values(config: RunConfig) -> Values:
    """Return the values of a model that follow from several of its fields, or from parts of it."""
    model = config.model
    values: Values = {**written_fields(model), "padded_vocab_size": model.vocab_size}
    if model.num_query_groups == model.num_attention_heads:
        del values["group_query_attention"], values["num_query_groups"]
    if model.experts:
        values |= _expert_values(model.experts)
    if model.latent_attention:
        values |= {"multi_latent_attention": True, **written_fields(model.latent_attention)}
    if model.window:
        values["window_size"] = f"{model.window.width - 1},0"
        if model.window.layers:
            values["window_attn_skip_freq"] = _runs(model.window.layers)
    return values


def _expert_values(experts: Experts) -> Values:
    values = written_fields(experts)
    if experts.layer_pattern:
        values["moe_layer_freq"] = _runs(experts.layer_pattern)
    return {**values, "moe_router_dtype": "fp32"} if experts.has_fp32_router else values


def _runs(flags: Sequence[bool]) -> str:
    """Return flags as Megatron evaluates them, such as ``[0]*3+[1]*58``."""
    runs = [(int(is_set), len(list(run))) for is_set, run in groupby(flags)]
    return "+".join(f"[{is_set}]*{num}" for is_set, num in runs)


OF_MODEL = Setting(
    # ``model_shape`` reads it.
    write=_model_values,
    part=ModelShape,
    switches=(*("multi_latent_attention", "quick_geglu", "use_rotary_position_embeddings"),),
    values=(
        *("encoder_num_layers", "encoder_seq_length", "make_vocab_size_divisible_by"),
        *("moe_layer_freq", "moe_router_dtype", "padded_vocab_size", "tokenizer_model"),
        *("tokenizer_type", "vocab_size", "window_attn_skip_freq", "window_size"),
    ),
    validated=(
        *("activation_func", "dsa_indexer_head_dim", "dsa_indexer_n_heads"),
        *("hybrid_attention_ratio", "hybrid_mlp_ratio", "is_hybrid_model"),
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads"),
        *("linear_num_value_heads", "linear_value_head_dim", "mamba_head_dim"),
        *("mamba_num_groups", "mamba_num_heads", "mamba_state_dim", "merge_file"),
    ),
)
"""Arguments of a model that no single field holds."""
