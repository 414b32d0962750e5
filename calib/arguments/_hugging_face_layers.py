"""Layers of a Hugging Face ``config.json``: what mixes tokens, which have experts, how wide.

Keys are those of transformers 5.23 and of the models' own files.  Layers that Megatron has no law
for become opaque layers of a hybrid pattern.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ConfigError
from ..workload.argument_values import Arguments
from ..workload.model_shape import (
    EXPERTS_SYMBOL,
    MLP_SYMBOL,
    AttentionWindow,
    Dispatcher,
    Experts,
    OpaqueLayer,
    at_least_one,
    at_most,
)
from ._hybrid_pattern import (
    HybridPattern,
    delta_net_layer,
    mamba_layer,
    opaque_layers,
    parse_pattern,
)

MIXER = "*"
_LATENT, _MAMBA, _DELTA_NET, _SPARSE, _LINEAR = "+MGDL"
_SYMBOLS = {
    **dict.fromkeys(("full_attention", "sliding_attention", "chunked_attention"), MIXER),
    **{"attention": MIXER, "indexed_attention": _SPARSE},
    **{"mamba": _MAMBA, "mlp": MLP_SYMBOL, "moe": EXPERTS_SYMBOL},
}
"""Symbols of words in ``layer_types`` and ``layers_block_type``."""
_LINEAR_WORD = "linear_attention"
_NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_k", "experts_per_token", "num_experts_per_token")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
LAYER_KEYS = frozenset(
    {
        *("layer_types", "layers_block_type", "hybrid_override_pattern", "attn_type_list"),
        *("attn_layer_period", "attn_layer_offset", "full_attention_interval"),
        *("mlp_layer_types", "moe_layers", "interleave_moe_layer_step", "expert_layer_period"),
        *("expert_layer_offset", "decoder_sparse_step", "mlp_only_layers", "num_dense_layers"),
        *("first_k_dense_replace", "moe_layer_freq", "moe_layer_start_index"),
        *("moe_layer_end_index", "moe_layer_interval", "moe_intermediate_size"),
        *("moe_shared_expert_intermediate_size", "linear_conv_kernel_dim"),
        *("linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
        *("linear_value_head_dim", "mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
        *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_expand"),
        *("mamba_d_conv", "mamba_dt_rank", "state_size", "time_step_rank", "expand", "n_groups"),
        *("conv_kernel", "attn_layer_indices", "index_n_heads", "index_head_dim", "index_topk"),
        *("num_heads", "is_moe", "mamba_chunk_size"),
        *("sliding_window", "attention_chunk_size", "sliding_window_pattern"),
        *("use_sliding_window", "max_window_layers", "no_rope_layers"),
        *("no_rope_layer_interval", "layer_switch"),
        *_NUM_EXPERTS,
        *_TOP_K,
        *_SHARED_WIDTH,
        *_NUM_SHARED,
    }
)
"""Keys that this module reads in any model."""


_WINDOWED, _CHUNKED = "sliding_attention", "chunked_attention"
_PERIOD = ("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval")


def window_of_keys(
    given: Arguments, num_layers: int, full_every: int | None, *, chunk_size: int = 0
) -> AttentionWindow | None:
    """Return the window or chunk of attention, and which of the layers have it; None if none has.

    ``full_every``: attention of every so many layers is full in this family, 0 if of none; None
    if the family is not known, whose window counts only if keys say which layers have it.
    ``chunk_size``: the family's default.
    """
    # Qwen names a window that it uses only if this switch is on.
    is_stated = given.get("max_window_layers") is not None
    width = given.number("sliding_window", "attention_chunk_size", default=chunk_size)
    if not width or not given.is_on("use_sliding_window", default=not is_stated):
        return None
    words = given.words("layer_types", "layers_block_type")
    period = given.number(*_PERIOD, "layer_switch", default=full_every or 0)
    limits: tuple[bool, ...]
    if words:
        limits = tuple(word in (_WINDOWED, _CHUNKED) for word in words)
    elif rotated := given.words("no_rope_layers"):
        limits = tuple(word == "1" for word in rotated)
    elif is_stated:
        first = given.number("max_window_layers")
        limits = tuple(layer >= first for layer in range(num_layers))
    elif not period and full_every is None:
        return None
    else:
        limits = tuple(not period or (layer + 1) % period > 0 for layer in range(num_layers))
    is_chunked = _CHUNKED in words or given.number("sliding_window") == 0
    is_all = all(limits)
    window = AttentionWindow(
        width=width, is_chunked=is_chunked, layers=() if is_all else limits[:num_layers]
    )
    return window if any(limits) else None


def layer_symbols(given: Arguments) -> tuple[str, bool]:
    """Return one symbol for each of a model's layers, and True if each is half a layer: a mixer,
    an MLP or experts alone.

    Raise ``ConfigError`` for a kind of layer that is not known, and for lists of another length
    than ``num_hidden_layers``.
    """
    pattern = given.text("hybrid_override_pattern")
    words = given.words("layers_block_type", "layer_types")
    if pattern:
        symbols, is_half = parse_pattern(pattern).layer_kinds, True
    elif words:
        symbols = "".join(_symbol(given, word) for word in words)
        is_half = bool(set(symbols) & {MLP_SYMBOL, EXPERTS_SYMBOL})
    else:
        number = given.required("num_hidden_layers")
        at_least_one("num_hidden_layers", number)
        at_most("num_layers", number)
        return _symbols_by_rule(given, number)
    number = given.number("num_hidden_layers", default=len(symbols))
    if number != len(symbols):
        raise ConfigError(
            f"config.json lists {len(symbols)} layers, not num_hidden_layers {number}; correct one"
        )
    return symbols, is_half


def _symbols_by_rule(given: Arguments, num_layers: int) -> tuple[str, bool]:
    attends = _attends(given)
    if attends is not None:
        other = _other_mixer(given)
        return "".join(MIXER if attends(layer) else other for layer in range(num_layers)), False
    if given.number("state_size") and not given.number("num_attention_heads"):
        return _MAMBA * num_layers, True
    if _other_mixer(given) != _LINEAR:
        raise ConfigError(
            "config.json sizes layers without attention, but no key says which they are; give "
            "layer_types, one entry for each layer"
        )
    if given.number("index_topk"):
        return _SPARSE * num_layers, False
    return (_LATENT if given.number("kv_lora_rank") else MIXER) * num_layers, False


def _symbol(given: Arguments, word: str) -> str:
    if word == _LINEAR_WORD:
        return _other_mixer(given)
    if word not in _SYMBOLS:
        known = ", ".join((*_SYMBOLS, _LINEAR_WORD))
        raise ConfigError(
            f"layer_types of config.json has {word!r}, which is not known; known are {known}"
        )
    return _SYMBOLS[word]


def _attends(given: Arguments) -> Callable[[int], bool] | None:
    """Return which layers (from 0) have attention, by the keys of hybrid models; None if all do."""
    listed = given.words("attn_type_list")
    if "0" in listed:
        return lambda layer: listed[layer % len(listed)] != "0"
    if period := given.number("attn_layer_period"):
        offset = given.number("attn_layer_offset")
        return lambda layer: layer % period == offset
    if indices := given.words("attn_layer_indices"):
        return lambda layer: str(layer) in indices
    if interval := given.number("full_attention_interval"):
        return lambda layer: (layer + 1) % interval == 0
    return None


def _other_mixer(given: Arguments) -> str:
    if given.number("linear_num_value_heads"):
        return _DELTA_NET
    return _MAMBA if given.number("mamba_d_state", "ssm_state_size") else _LINEAR


def opaque_of_keys(given: Arguments, symbols: str, hidden: int) -> tuple[OpaqueLayer, ...]:
    """Return the sizes of the opaque layers among ``symbols``."""
    makers = {_MAMBA: _mamba, _DELTA_NET: _delta_net, _SPARSE: _sparse, _LINEAR: _lightning}
    return tuple(make(given, hidden) for symbol, make in makers.items() if symbol in symbols)


def _mamba(given: Arguments, hidden: int) -> OpaqueLayer:
    """Return a Mamba-2 mixer, or Mamba-1 if the keys have a rank of steps and no heads."""
    state = given.required(_first(given, "ssm_state_size", "mamba_d_state", "state_size"))
    expand = given.number("mamba_expand", "expand", default=2)
    rank = given.get("mamba_dt_rank", "time_step_rank")
    heads = given.number("mamba_num_heads", "mamba_n_heads", "num_heads")
    if rank is not None and not heads:
        auto = -(-hidden // 16)
        steps = auto if rank == "auto" else given.number("mamba_dt_rank", "time_step_rank")
        convolution = given.number("mamba_d_conv", "conv_kernel", default=4)
        return _mamba_1(hidden, expand * hidden, state, steps, convolution)
    at_least_one("num_heads", heads)
    head = given.get("mamba_head_dim", "mamba_d_head", "head_dim")
    inner = expand * hidden if head in (None, "auto") else heads * _head(given)
    groups = given.number("mamba_n_groups", "n_groups", default=1)
    return mamba_layer(hidden=hidden, inner=inner, heads=heads, groups=groups, state=state)


def _head(given: Arguments) -> int:
    return given.number("mamba_head_dim", "mamba_d_head", "head_dim")


def _mamba_1(hidden: int, inner: int, state: int, rank: int, convolution: int) -> OpaqueLayer:
    """Return a Mamba-1 mixer (Gu and Dao 2023, arXiv:2312.00752): values and gate from one product,
    a convolution, steps of low rank with B and C, the scan, and a product back."""
    products = 3 * hidden * inner + inner * (rank + 2 * state) + rank * inner
    return OpaqueLayer(
        symbol=_MAMBA,
        split_numel=products + inner * (convolution + 1) + inner * (state + 2),
        whole_numel=rank + 2 * state,
        saved_width=5 * inner,
        # Scan: 7 FLOP per element of the states, as in Mamba-2.
        multiply_adds=products + inner * convolution + 7 * inner * state // 2,
    )


def _delta_net(given: Arguments, hidden: int) -> OpaqueLayer:
    return delta_net_layer(
        hidden=hidden,
        key_heads=given.required("linear_num_key_heads"),
        key_dim=given.required("linear_key_head_dim"),
        value_heads=given.required("linear_num_value_heads"),
        value_dim=given.required("linear_value_head_dim"),
        convolution=given.number("linear_conv_kernel_dim", default=4),
    )


def _sparse(given: Arguments, hidden: int) -> OpaqueLayer:
    """Return latent attention with an indexer; Megatron has other names for its keys."""
    names = {
        "qk_head_dim": "qk_nope_head_dim",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "dsa_indexer_n_heads": "index_n_heads",
        "dsa_indexer_head_dim": "index_head_dim",
        **{name: name for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim")},
        "num_attention_heads": "num_attention_heads",
    }
    sizes = {name: given.required(key) for name, key in names.items()}
    pattern = HybridPattern(layer_kinds=_SPARSE, segments=(1,))
    return opaque_layers(Arguments({**sizes, "hidden_size": hidden}), pattern)[0]


def _lightning(given: Arguments, hidden: int) -> OpaqueLayer:
    """Return lightning attention (MiniMax-01, arXiv:2501.08313): queries, keys, values and a gate,
    each as wide as all heads, a norm of the output, a product back."""
    if not given.words("attn_type_list"):
        raise ConfigError(
            "config.json has linear attention whose sizes are not known; known are the keys "
            "linear_* of gated delta nets and attn_type_list of lightning attention"
        )
    heads, head = given.required("num_attention_heads"), given.required("head_dim")
    inner = heads * head
    return OpaqueLayer(
        symbol=_LINEAR,
        split_numel=5 * hidden * inner + inner,
        saved_width=6 * inner,
        # A token's key and value enter the state of its head, and its query reads it.
        multiply_adds=5 * hidden * inner + 2 * inner * head,
    )


def experts_of_keys(
    given: Arguments, *, num_layers: int, width: int, has_shared_expert: bool
) -> Experts | None:
    """Return the experts of a model, None if it has none; ``width``: of the MLP.

    ``has_shared_expert``: one as wide as a routed one, without a key that says so.
    """
    number = given.number(_first(given, *_NUM_EXPERTS))
    if not number or not given.is_on("is_moe", default=True):
        return None
    width = given.number("moe_intermediate_size", default=width)
    shared = given.number(_first(given, *_SHARED_WIDTH))
    if not shared:
        shared_width = given.number("moe_shared_expert_intermediate_size", default=width)
        shared = shared_width * given.number(*_NUM_SHARED, default=int(has_shared_expert))
    pattern = tuple(_is_sparse(given, layer, num_layers) for layer in range(num_layers))
    if not any(pattern):
        return None
    return Experts(
        num_experts=number,
        top_k=given.number(*_TOP_K, default=2),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=shared,
        has_shared_gate=bool(given.number("shared_expert_intermediate_size")),
        layer_pattern=() if all(pattern) else pattern,
        dispatcher=Dispatcher.ALL_TO_ALL,
        is_grouped=True,
    )


def _is_sparse(given: Arguments, layer: int, num_layers: int) -> bool:
    """Return True if no key places a dense MLP in the layer, counted from 0."""
    kinds, listed = given.words("mlp_layer_types"), given.words("moe_layers")
    frequency = given.words("moe_layer_freq")
    if kinds and layer < len(kinds):
        return kinds[layer] != "dense"
    if listed:
        return str(layer) in listed
    if len(frequency) > 1:
        return layer < len(frequency) and frequency[layer] != "0"
    end = given.number("moe_layer_end_index", default=-1)
    last = end if end >= 0 else num_layers - 1
    return (
        layer >= given.number("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
        and layer <= last
        and layer % _step(given, "moe_layer_freq") == 0
        and (layer + 1) % _step(given, "decoder_sparse_step") == 0
        and (layer + 1) % _step(given, "interleave_moe_layer_step") == 0
        and (layer + 1) % _step(given, "moe_layer_interval") == 0
        and layer % _step(given, "expert_layer_period") == given.number("expert_layer_offset")
        and str(layer) not in given.words("mlp_only_layers")
    )


def _step(given: Arguments, name: str) -> int:
    step = given.number(name, default=1)
    at_least_one(name, step)
    return step


def _first(given: Arguments, *names: str) -> str:
    """Return the first of some names whose value is not 0, since files state both; else the
    first."""
    return next((name for name in names if given.number(name)), names[0])
