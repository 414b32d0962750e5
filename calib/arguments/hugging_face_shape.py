"""Model shape from the keys of a Hugging Face ``config.json``.

A few facts of a family are in the code of its class and in no key: ``_FAMILIES``.  Other families
are read by their keys alone, and refused if a key that sizes the model is not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import ConfigError
from ..workload.argument_values import Arguments
from ..workload.model_shape import (
    EXPERTS_SYMBOL,
    MLP_SYMBOL,
    Experts,
    LatentAttention,
    ModelShape,
    Normalization,
    PositionEmbedding,
    at_least_one,
)
from ._hugging_face_layers import (
    LAYER_KEYS,
    experts_of_keys,
    layer_symbols,
    opaque_of_keys,
    window_of_keys,
)

_RMS, _LAYER = Normalization.RMS_NORM, Normalization.LAYER_NORM


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Facts that the class of a model fixes; a key of ``config.json`` takes precedence."""

    is_gated: bool = True
    has_bias: bool = False
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_attention_gate: bool = False
    is_tied: bool = False
    """Default of ``tie_word_embeddings``, which files omit where it is the default."""
    is_residual_parallel: bool = False
    normalization: Normalization = _RMS
    has_shared_expert: bool = False
    """One shared expert as wide as a routed one."""
    vocab_size: int = 0
    """Default of a family whose files omit it."""
    full_every: int = 0
    """Attention of every so many layers has no window, if ``layer_types`` is omitted; 0: of
    none."""
    chunk_size: int = 0
    """Default of ``attention_chunk_size``."""


_PLAIN = _Family()
_QWEN2, _QWEN3 = _Family(has_qkv_bias=True), _Family(has_qk_norm=True)
_QWEN3_GATED = _Family(has_qk_norm=True, has_attention_gate=True)
_GEMMA3 = _Family(has_qk_norm=True, is_tied=True, vocab_size=262_208, full_every=6)
_LLAMA4 = _Family(has_shared_expert=True, full_every=4, chunk_size=8192)
_COHERE = _Family(is_tied=True, is_residual_parallel=True, normalization=_LAYER)
_FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "ministral3", "mixtral", "phi3", "granite"), _PLAIN),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), _PLAIN),
    **dict.fromkeys(("glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "seed_oss"), _PLAIN),
    **dict.fromkeys(("jamba", "mamba2", "minimax_text_01", "granitemoe"), _PLAIN),
    **dict.fromkeys(("qwen2", "qwen2_moe"), _QWEN2),
    **dict.fromkeys(("qwen3", "qwen3_moe", "minimax_m2", "olmoe"), _QWEN3),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text"), _QWEN3_GATED),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _QWEN3_GATED),
    "olmo2": _QWEN3,
    "olmo3": replace(_QWEN3, full_every=4),
    "gemma": _Family(is_tied=True),
    "gemma2": _Family(is_tied=True, full_every=2),
    **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA3),
    **dict.fromkeys(("llama4", "llama4_text"), _LLAMA4),
    **dict.fromkeys(("smollm3", "ernie4_5", "ernie4_5_moe"), _Family(is_tied=True)),
    "gpt_oss": _Family(has_bias=True, full_every=2),
    "gpt_neox": _Family(
        is_gated=False, has_bias=True, is_residual_parallel=True, normalization=_LAYER
    ),
    "phi": _Family(is_gated=False, has_bias=True, is_residual_parallel=True, normalization=_LAYER),
    "phimoe": _Family(normalization=_LAYER, has_qkv_bias=True),
    "starcoder2": _Family(is_gated=False, has_bias=True, is_tied=True, normalization=_LAYER),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, full_every=4),
    **dict.fromkeys(("stablelm", "olmo"), _Family(normalization=_LAYER)),
    "arcee": _Family(is_gated=False),
    "nemotron": _Family(is_gated=False, normalization=_LAYER),
    "nemotron_h": _Family(is_gated=False),
}
GPT2 = "gpt2"
_LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_READ = LAYER_KEYS | {
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "intermediate_size_mlp", "vocab_size", "max_position_embeddings"),
    *("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "use_qk_norm", "qk_layernorm"),
    *("attention_head_dim", "attn_output_gate"),
    *("tie_word_embeddings", "use_parallel_residual", "num_nextn_predict_layers", "hidden_act"),
    *("qk_head_dim", *_LATENT_KEYS),
}
_DECIDING = re.compile(
    r"layer|expert|moe|head|hidden|inter|ffn|mlp|dim|rank|group|attn|attention|mamba|ssm|conv|"
    r"embed|linear|size|block|index|lora|width|depth|expan|state|num_|recur|memory|module"
)
_HARMLESS = re.compile(
    r"dropout|pdrop|drop$|_act$|activation|initializer|_eps|epsilon|token|loss|coef|rope|rotary|"
    r"partial|window|chunk_size_|softcap|scal|output_|_implementation|topk_group|n_group$|cache|"
    r"quant|torch|dtype|norm_topk|return_|is_encoder|cross_attention$|num_labels|beam|multiplier|"
    r"pretraining_tp|prune|problem|max_length|chunk_size_feed|score|routing|jitter|grouped_mm|"
    r"original_max|conv_bias|softmax_in|_clip|bos|eos|pad_|architectures|logit|experts_implementation|auto_map|_range|"
    # Prediction layers, which do not count, indexers, whose time a run measures, and kernels.
    r"^mtp_|^num_mtp_modules$|^index_(?:share|skip|topk_freq)|^indexer_types$|^ep_size$|"
    r"^chunk_size$|_kernels$|temperature|capacity"
)
_ENCODER = re.compile(r"(?:vision|audio|speech)\w*_config|vision_\w*tower")
_ENCODERS = re.compile(r"bert|t5|bart|electra|pegasus|marian|whisper|^clip|^vit")
_GATED = ("silu", "swish")


def text_keys(config: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of the language model: those of ``text_config`` if it has sizes."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or "hidden_size" not in text:
        return dict(config)
    outer = {name: config[name] for name in ("model_type", "tie_word_embeddings") if name in config}
    return {**outer, **{str(name): value for name, value in text.items()}}


def _named(kind: str) -> str:
    return f"model_type {kind!r}" if kind else "a config.json without model_type"


def shape_of_keys(keys: Mapping[str, object]) -> ModelShape:
    """Return a model's shape; raise ``ConfigError`` for a key or value that is not understood."""
    given, kind = Arguments(keys), str(keys.get("model_type") or "")
    is_known = kind in _FAMILIES or kind == GPT2
    if keys.get("is_encoder_decoder") or not (is_known or _is_decoder(given)):
        raise ConfigError(
            f"{_named(kind)} is not of a decoder alone, and no encoder is modelled; give a GPT"
        )
    if strange := _unread_keys(keys, is_known=is_known):
        raise ConfigError(
            f"{_named(kind)} is {'' if is_known else 'not '}known, "
            f"{'but not' if is_known else 'nor'} what {', '.join(strange[:4])} "
            f"{'does' if len(strange) == 1 else 'do'}; {_REMEDY}"
        )
    if kind == GPT2:
        return _gpt2(given)
    family = _FAMILIES.get(kind) or _by_keys(keys, given, kind)
    symbols, is_half = layer_symbols(given)
    full_every = family.full_every if kind in _FAMILIES else None
    window = window_of_keys(given, len(symbols), full_every, chunk_size=family.chunk_size)
    shape = replace(_shape(given, family, len(symbols)), window=window)
    experts = experts_of_keys(
        given,
        num_layers=len(symbols),
        width=given.number("intermediate_size"),
        has_shared_expert=family.has_shared_expert,
    )
    opaque = opaque_of_keys(given, symbols, shape.hidden_size)
    if not (opaque or is_half):
        return _with_latent(given, replace(shape, experts=experts))
    kinds = symbols if is_half else _halves(symbols, experts)
    if experts is not None:
        experts = replace(experts, layer_pattern=())
    if window is not None and window.layers and not is_half:
        both = tuple(flag for limited in window.layers for flag in (limited, False))
        window = replace(window, layers=both)
    num_predicted = shape.num_prediction_layers
    return _with_latent(
        given,
        replace(
            shape,
            num_layers=len(kinds),
            layer_kinds=kinds,
            prediction_kinds=kinds[-2:] if num_predicted and not is_half else "",
            opaque_layers=opaque,
            window=window,
            experts=experts if EXPERTS_SYMBOL in kinds else None,
        ),
    )


def _halves(mixers: str, experts: Experts | None) -> str:
    """Return symbols of mixers and of what follows each, an MLP or experts."""
    pattern = experts.layer_pattern if experts is not None else (False,) * len(mixers)
    sparse = pattern or (True,) * len(mixers)
    pairs = zip(mixers, sparse, strict=True)
    return "".join(
        mixer + (EXPERTS_SYMBOL if is_sparse else MLP_SYMBOL) for mixer, is_sparse in pairs
    )


def _shape(given: Arguments, family: _Family, num_layers: int) -> ModelShape:
    hidden = given.required("hidden_size")
    # A model of state-space layers alone has heads of these.
    heads = given.number("num_attention_heads", "num_heads")
    at_least_one("num_attention_heads", heads or given.required("num_attention_heads"))
    channels = given.number("head_dim", "attention_head_dim", default=hidden // heads)
    has_bias = given.is_on("mlp_bias", "use_bias", default=family.has_bias)
    is_qkv = given.is_on("attention_bias", "use_qkv_bias", default=family.has_qkv_bias)
    vocab = given.number("vocab_size", default=family.vocab_size)
    is_rms = given.get("rms_norm_eps") is not None or family.normalization is _RMS
    return ModelShape(
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=_width(given, hidden),
        num_attention_heads=heads,
        num_query_groups=given.number("num_key_value_heads", default=heads),
        kv_channels=channels,
        seq_length=1,
        vocab_size=vocab or given.required("vocab_size"),
        is_gated=family.is_gated,
        has_bias=has_bias,
        has_qkv_bias=is_qkv and not has_bias,
        has_qk_norm=given.is_on("use_qk_norm", "qk_layernorm", default=family.has_qk_norm),
        has_attention_gate=given.is_on("attn_output_gate", default=family.has_attention_gate),
        is_tied=given.is_on("tie_word_embeddings", default=family.is_tied),
        normalization=_RMS if is_rms else _LAYER,
        position_embedding=PositionEmbedding.ROPE,
        max_position_embeddings=given.number("max_position_embeddings"),
        is_residual_parallel=given.is_on(
            "use_parallel_residual", default=family.is_residual_parallel
        ),
        num_prediction_layers=given.number("num_nextn_predict_layers"),
    )


def _width(given: Arguments, hidden: int) -> int:
    """Return the width of a dense MLP; a state-space model without one has that of its mixers."""
    if given.get("num_attention_heads") is None:
        return given.number("expand", default=2) * hidden
    names = ("intermediate_size_mlp", "intermediate_size", "moe_intermediate_size")
    return given.required(next((n for n in names if given.get(n) is not None), names[1]))


def _unread_keys(keys: Mapping[str, object], *, is_known: bool) -> list[str]:
    """Return the keys that may change a model and are not read; of a known family those alone that
    may hold a size, since its class fixes the rest."""
    read = _READ | ({"n_head", "n_inner", "n_layer"} if keys.get("model_type") == GPT2 else set())
    return sorted(
        name
        for name, value in keys.items()
        if name not in read
        and value not in (None, False, 0, "", [], {})
        and not (is_known and (value == 1 or not isinstance(value, int | list | dict)))
        and _DECIDING.search(name)
        and not _HARMLESS.search(name)
    )


def _by_keys(keys: Mapping[str, object], given: Arguments, kind: str) -> _Family:
    """Return the facts of a family that is not known; raise ``ConfigError`` unless keys settle
    them."""
    activation = given.text("hidden_act")
    if activation not in _GATED or given.get("rms_norm_eps") is None:
        raise ConfigError(
            f"{_named(kind)} is not known, and without rms_norm_eps and "
            f"hidden_act silu its layers are open; {_REMEDY}"
        )
    return _PLAIN


_REMEDY = "give the model as Megatron's options, such as --num-layers and --hidden-size"


def _is_decoder(given: Arguments) -> bool:
    names = given.words("architectures")
    if _ENCODERS.search(given.text("model_type")):
        return False
    return not names or any("ForCausalLM" in n or "ForConditional" in n for n in names)


def notes_of_keys(config: Mapping[str, object], *, seq_length: int) -> tuple[str, ...]:
    """Return what a model's shape assumes or omits, one sentence each."""
    keys = text_keys(config)
    given, kind = Arguments(keys), str(keys.get("model_type") or "")
    notes = []
    if kind not in _FAMILIES and kind != GPT2:
        notes.append(
            f"{_named(kind)} is not known and read by its keys: RMSNorm, no "
            f"biases or query-key norms but those named, embedding and head "
            f"{'shared' if given.is_on('tie_word_embeddings') else 'separate'}"
        )
    width = given.number("sliding_window", "attention_chunk_size")
    is_open = kind not in _FAMILIES and not given.words("layer_types", "layers_block_type")
    is_used = given.is_on("use_sliding_window", default="max_window_layers" not in keys)
    if is_open and is_used and 0 < width < seq_length and shape_of_keys(keys).window is None:
        notes.append(
            f"config.json names a window of {width:,} tokens but no layer_types: attention counts "
            f"as full, which overstates its time"
        )
    encoders = sorted(name for name in config if _ENCODER.fullmatch(name) and config[name])
    if encoders:
        notes.append(f"config.json has {', '.join(encoders)}: only its text model counts")
    if number := given.number("num_mtp_modules", "mtp_num_hidden_layers"):
        notes.append(f"config.json has {number} prediction layers, which do not count")
    return tuple(notes)


def _with_latent(given: Arguments, shape: ModelShape) -> ModelShape:
    if not given.number("kv_lora_rank"):
        return shape
    return replace(
        shape,
        num_query_groups=shape.num_attention_heads,
        # Megatron calls the norms of the latent vectors query-key norms.
        has_qk_norm=True,
        latent_attention=LatentAttention(
            q_lora_rank=given.number("q_lora_rank"),
            kv_lora_rank=given.required("kv_lora_rank"),
            qk_head_dim=given.required("qk_nope_head_dim"),
            qk_pos_emb_head_dim=given.required("qk_rope_head_dim"),
            v_head_dim=given.required("v_head_dim"),
        ),
    )


def _gpt2(given: Arguments) -> ModelShape:
    hidden, heads = given.required("n_embd"), given.required("n_head")
    return ModelShape(
        num_layers=given.required("n_layer"),
        hidden_size=hidden,
        ffn_hidden_size=given.number("n_inner", default=4 * hidden),
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        seq_length=1,
        vocab_size=given.required("vocab_size"),
        is_tied=given.is_on("tie_word_embeddings", default=True),
        max_position_embeddings=given.number("n_positions", "n_ctx"),
    )
