"""Megatron's pattern of a hybrid model's layers, and the sizes of layers that have no law.

The rules are those of ``megatron/core/models/hybrid`` and ``megatron/training/arguments.py`` of
core_v0.19.0: one symbol is one layer, ``|`` ends a pipeline segment, ``/`` begins the layers of a
prediction layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..workload.argument_fields import read_fields
from ..workload.argument_values import Arguments, Values, option_of
from ..workload.config import RunConfig
from ..workload.model_shape import (
    ATTENTION_SYMBOLS,
    EXPERTS_SYMBOL,
    MLP_SYMBOL,
    MOST,
    LatentAttention,
    Normalization,
    OpaqueLayer,
)

PATTERN = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Megatron's argument, and its name before core_v0.17.0."""
_DELTA_NET, _SPARSE, _MAMBA = "GDM"
_KNOWN = ATTENTION_SYMBOLS + MLP_SYMBOL + EXPERTS_SYMBOL + _MAMBA + _DELTA_NET + _SPARSE
_MAMBA_EXPANSION, _CONVOLUTION = 2, 4
_REFUSED = (
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split"),
    "account_for_loss_in_pipeline_split",
)
_REFUSED_WITH_SEGMENTS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
)
RATIOS = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
"""Arguments before patterns, which leave the order of layers to Megatron."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPattern:
    """Parsed pattern of a hybrid model."""

    layer_kinds: str
    """Symbols of all layers."""
    segments: tuple[int, ...]
    """Layers of each pipeline segment, in model order; one segment without ``|``."""
    prediction_kinds: str = ""
    """Symbols of the layers inside each prediction layer."""
    num_prediction_layers: int = 0


def parse_pattern(text: str) -> HybridPattern:
    """Parse a pattern; raise ``ConfigError`` for a symbol or combination that Megatron refuses.

    >>> parse_pattern("*-M-|*E/*E/*E")
    HybridPattern(layer_kinds='*-M-*E', segments=(4, 2), prediction_kinds='*E', \
num_prediction_layers=2)
    """
    if len(text) > MOST["num_layers"]:
        raise ConfigError(
            f"--hybrid-layer-pattern has {len(text)} symbols, above {MOST['num_layers']:,}; "
            f"shorten it"
        )
    main, *predictions = text.split("/")
    if len(set(predictions)) > 1:
        raise ConfigError(
            f"--hybrid-layer-pattern {text!r} has prediction layers that differ; repeat one"
        )
    segments = main.split("|")
    kinds, inner = "".join(segments), predictions[0] if predictions else ""
    for symbol in kinds + inner:
        if symbol not in _KNOWN:
            raise ConfigError(
                f"--hybrid-layer-pattern {text!r} has {symbol!r}, which is no layer; symbols are "
                f"{' '.join(_KNOWN)}, | between segments and / before prediction layers"
            )
    if not kinds:
        raise ConfigError(f"--hybrid-layer-pattern {text!r} has no layers; give such as '*-*-'")
    if "*" in kinds and set(kinds) & {_SPARSE, "+"}:
        raise ConfigError(
            f"--hybrid-layer-pattern {text!r} has * together with latent attention (+ or D); "
            f"leave one out"
        )
    return HybridPattern(
        layer_kinds=kinds,
        segments=tuple(map(len, segments)),
        prediction_kinds=inner,
        num_prediction_layers=len(predictions) if inner else 0,
    )


def pattern_of(given: Arguments) -> HybridPattern | None:
    """Return the pattern of a hybrid model; None for a GPT.

    Raise ``ConfigError`` for arguments that Megatron refuses with a pattern, and for the ratios
    that came before patterns.
    """
    text = given.text(*PATTERN)
    if not text:
        if any(given.real(name) for name in RATIOS) or given.is_on("is_hybrid_model"):
            raise ConfigError(
                "--hybrid-attention-ratio and --hybrid-mlp-ratio leave the order of the layers "
                "open; give --hybrid-layer-pattern, which Megatron prints in its log"
            )
        return None
    pattern = parse_pattern(text)
    refused = _REFUSED + (_REFUSED_WITH_SEGMENTS if len(pattern.segments) > 1 else ())
    for name in refused:
        if given.is_on(name):
            raise ConfigError(
                f"{option_of(name)} is refused with --hybrid-layer-pattern; put | "
                f"between the layers of pipeline segments"
            )
    return pattern


def with_pattern(given: Arguments) -> tuple[Arguments, HybridPattern | None]:
    """Return the arguments with the numbers of layers that their pattern sets, and the pattern."""
    pattern = pattern_of(given)
    if pattern is None:
        return given, None
    values: Values = {
        "num_layers": len(pattern.layer_kinds),
        "mtp_num_layers": pattern.num_prediction_layers or None,
        "moe_layer_freq": None,
    }
    if set(pattern.layer_kinds + pattern.prediction_kinds) & {"+", _SPARSE}:
        values["multi_latent_attention"] = True
    return given.put_over(values), pattern


def segments_of(pattern: HybridPattern | None, pp: int) -> tuple[int, ...]:
    """Return the layers of each pipeline segment; () for a GPT, or without ``|``.

    Raise ``ConfigError`` if the stages do not divide the segments.
    """
    if pattern is None or (len(pattern.segments) == 1 and pp > 1):
        return ()
    if len(pattern.segments) % max(pp, 1):
        raise ConfigError(
            f"--hybrid-layer-pattern has {len(pattern.segments)} segments, not a multiple of "
            f"--pipeline-model-parallel-size {pp}; put | between the layers of segments"
        )
    return pattern.segments if len(pattern.segments) > 1 else ()


def write_pattern(config: RunConfig) -> str:
    """Return the pattern of a hybrid layout, with ``|`` between the layers of chunks.

    >>> from ..workload.config import Batch
    >>> from ..workload.model_shape import ModelShape
    >>> from ..workload.parallelism import Parallelism
    >>> gpt = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128, layer_kinds="*-*-")
    >>> write_pattern(RunConfig(model=gpt, parallelism=Parallelism(pp=2),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8)))
    '*-|*-'
    """
    model = config.model
    chunks = (config.layers_of(chunk) for chunk in range(config.parallelism.num_chunks))
    main = "|".join(model.layer_kinds[layers.start : layers.stop] for layers in chunks)
    return main + f"/{model.prediction_kinds}" * model.num_prediction_layers


def pattern_values(config: RunConfig) -> Values:
    """Return the argument of a hybrid layout: before core_v0.17.0 of another name, and without
    ``|``, since stages are even there."""
    pattern = write_pattern(config)
    if option_of(PATTERN[0]) in config.absent:
        return {PATTERN[1]: pattern.replace("|", "")}
    return {PATTERN[0]: pattern}


def opaque_layers(given: Arguments, pattern: HybridPattern) -> tuple[OpaqueLayer, ...]:
    """Return the sizes of a pattern's opaque layers."""
    hidden = given.required("hidden_size")
    kinds = pattern.layer_kinds + pattern.prediction_kinds
    makers = {_MAMBA: _mamba, _DELTA_NET: _delta_net, _SPARSE: _sparse}
    return tuple(make(given, hidden) for symbol, make in makers.items() if symbol in kinds)


def _mamba(given: Arguments, hidden: int) -> OpaqueLayer:
    """Return a Mamba-2 mixer (``megatron/core/ssm/mamba_mixer.py``)."""
    state = given.number("mamba_state_dim", default=128)
    head = given.number("mamba_head_dim", default=64)
    groups = given.number("mamba_num_groups", default=8)
    heads = given.number("mamba_num_heads") or _MAMBA_EXPANSION * hidden // max(head, 1)
    return mamba_layer(hidden=hidden, inner=heads * head, heads=heads, groups=groups, state=state)


def mamba_layer(
    *, hidden: int, inner: int, heads: int, groups: int, state: int, has_bias: bool = True
) -> OpaqueLayer:
    """Return a Mamba-2 mixer: a product into gate, values, B, C and steps, a convolution of four
    tokens, the scan, a norm, and a product back (Dao and Gu 2024, arXiv:2405.21060).

    ``has_bias``: of the convolution.
    """
    convolved = inner + 2 * groups * state
    entering = inner + convolved + heads
    products = hidden * (entering + inner)
    return OpaqueLayer(
        symbol=_MAMBA,
        split_numel=products + convolved * (_CONVOLUTION + has_bias) + 3 * heads + inner,
        saved_width=entering + 2 * inner,
        # Scan: 7 FLOP per element of the states, as Megatron counts.
        multiply_adds=products + 7 * inner * state // 2,
    )


def _delta_net(given: Arguments, hidden: int) -> OpaqueLayer:
    """Return a gated delta net (``megatron/core/ssm/gated_delta_net``)."""
    return delta_net_layer(
        hidden=hidden,
        key_heads=given.number("linear_num_key_heads", default=16),
        key_dim=given.number("linear_key_head_dim", default=128),
        value_heads=given.number("linear_num_value_heads", default=32),
        value_dim=given.number("linear_value_head_dim", default=128),
        convolution=given.number("linear_conv_kernel_dim", default=4),
        has_norm_bias=given.text("normalization") != Normalization.RMS_NORM.value,
    )


def delta_net_layer(
    *,
    hidden: int,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
    convolution: int,
    has_norm_bias: bool = False,
) -> OpaqueLayer:
    """Return a gated delta net (Yang et al. 2024, arXiv:2412.06464): queries, keys, values and
    gates from one product, a convolution, the delta rule, a norm of each head, a product back."""
    keys, values = key_heads * key_dim, value_heads * value_dim
    convolved = 2 * keys + values
    entering = convolved + values + 2 * value_heads
    products = hidden * (entering + values)
    return OpaqueLayer(
        symbol=_DELTA_NET,
        split_numel=products + convolved * convolution + 2 * value_heads,
        whole_numel=value_dim * (1 + has_norm_bias),
        saved_width=entering + convolved + 2 * values,
        multiply_adds=products + convolved * convolution + 4 * value_heads * value_dim**2,
    )


def _sparse(given: Arguments, hidden: int) -> OpaqueLayer:
    """Return latent attention with an indexer that selects keys (DeepSeek-V3.2)."""
    heads = given.required("num_attention_heads")
    latent = LatentAttention(**read_fields(LatentAttention, given))
    query = latent.qk_head_dim + latent.qk_pos_emb_head_dim
    index_heads = given.number("dsa_indexer_n_heads", default=64)
    index_dim = given.number("dsa_indexer_head_dim", default=128)
    low = latent.q_lora_rank
    split = (low or hidden) * heads * query
    split += latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim)
    split += heads * latent.v_head_dim * hidden
    whole = hidden * (low + latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
    whole += (low or hidden) * index_heads * index_dim + hidden * (index_dim + index_heads)
    return OpaqueLayer(
        symbol=_SPARSE,
        split_numel=split,
        whole_numel=whole + 2 * index_dim,
        saved_width=heads * (2 * query + latent.v_head_dim),
        multiply_adds=split + whole,
    )
