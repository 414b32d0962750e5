"""Name of a model (its kind and number of parameters), and its FLOP per token.

FLOP are counted as in Megatron-LM and are the basis of TFLOP/s and MFU.  They describe the model,
not a layout: neither recompute nor any split enters them.
"""

from __future__ import annotations

from dataclasses import replace

from ..workload.config import Batch, RunConfig
from ..workload.model_shape import (
    ATTENTION_SYMBOLS,
    EXPERTS_SYMBOL,
    MLP_SYMBOL,
    Experts,
    LatentAttention,
    ModelShape,
)
from ..workload.parallelism import Parallelism
from .stage_work import stage_parameters

_NAMES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_FEW = 9.95
"""Numbers from here on round to two digits before the point and are shown without decimals."""


def model_name(config: RunConfig) -> str:
    """Return the usual name of the model, ``GPT 13B`` or ``MoE 47B (13B active)``.

    All parameters count, embeddings and padded rows of the vocabulary too; active parameters are
    those of the same model with ``top_k`` experts, the number that a token passes through.
    """
    model, experts = config.model, config.model.experts
    total = count_name(_num_parameters(config, model))
    if experts is None:
        return f"{'hybrid' if model.opaque_layers else 'GPT'} {total}"
    met = replace(model, experts=replace(experts, num_experts=experts.top_k))
    return f"MoE {total} ({count_name(_num_parameters(config, met))} active)"


def _num_parameters(config: RunConfig, model: ModelShape) -> int:
    """Return the parameters of a model of this shape, unsplit."""
    whole = replace(
        config,
        model=model,
        parallelism=Parallelism(),
        batch=Batch(micro_batch_size=1, global_batch_size=1),
        recompute_num_layers=0,
    )
    return sum(stage_parameters(whole, 0))


def count_name(number: float) -> str:
    """Return a number of parameters in two or three digits.

    >>> [count_name(n) for n in (46.7e9, 1.31e9, 354_871_296, 842_496, 99)]
    ['47B', '1.3B', '355M', '842K', '99']
    """
    for size, name in _NAMES:
        if number >= 0.9995 * size:
            scaled = number / size
            return f"{scaled:.1f}{name}" if scaled < _FEW else f"{scaled:.0f}{name}"
    return f"{number:.0f}"


_PASSES = 3
"""Forward, gradient of the input, gradient of the weight."""
_FLOP_PER_PRODUCT = 2
"""A multiplication and an addition."""
_SEEN_FRAC = 0.5
"""Share of the square of scores that a causal mask leaves."""


def model_flop_per_token(model: ModelShape) -> float:
    """Return the FLOP of one token, forward and backward.

    Megatron-LM core 0.16.1, ``num_floating_point_operations`` of ``megatron/training/training.py``:
    matrix products three times at 2 FLOP, half of the square of scores, top-k and shared experts,
    latent attention, prediction layers, and the padded vocabulary.  Elementwise work, the
    embedding's look-up and the router are not counted.  PaLM (Chowdhery et al. 2022, appendix B)
    counts the whole square of scores.

    >>> shape = ModelShape(num_layers=96, hidden_size=12288, ffn_hidden_size=49152,
    ...     num_attention_heads=96, num_query_groups=96, kv_channels=128, seq_length=2048,
    ...     vocab_size=51200)
    >>> model_flop_per_token(shape)
    1061947441152.0
    """
    products = _hybrid_layers(model) if model.layer_kinds else _layers(model)
    return float(_PASSES * _FLOP_PER_PRODUCT * (products + _head(model)))


def _layers(model: ModelShape) -> float:
    products = sum(_mlp(model, layer) for layer in range(model.num_layers))
    # Prediction layers are of the same kind as the last layer.
    products += model.num_prediction_layers * _mlp(model, model.num_layers - 1)
    num_layers = model.num_layers + model.num_prediction_layers
    return products + num_layers * _attention(model)


def _hybrid_layers(model: ModelShape) -> float:
    """Return the multiply-adds of one token in all layers of a hybrid model."""
    of_kind = {
        **dict.fromkeys(ATTENTION_SYMBOLS, _attention(model)),
        MLP_SYMBOL: _mlp_of_width(model, model.ffn_hidden_size),
        EXPERTS_SYMBOL: _mlp_of_width(model, _met_width(model.experts)) if model.experts else 0,
        **{one.symbol: one.multiply_adds for one in model.opaque_layers},
    }
    kinds = model.layer_kinds + model.prediction_kinds * model.num_prediction_layers
    return sum(of_kind[symbol] for symbol in kinds)


def _mlp(model: ModelShape, layer: int) -> int:
    """Return the multiply-adds of one token in a layer's MLP, or in the experts that it uses."""
    width = model.ffn_hidden_size
    if model.experts is not None and model.has_experts(layer):
        width = _met_width(model.experts)
    return _mlp_of_width(model, width)


def _mlp_of_width(model: ModelShape, width: int) -> int:
    return (3 if model.is_gated else 2) * model.hidden_size * width


def _met_width(experts: Experts) -> int:
    return experts.top_k * experts.ffn_hidden_size + experts.shared_ffn_hidden_size


def _attention(model: ModelShape) -> float:
    if model.latent_attention is not None:
        return _latent(model, model.latent_attention)
    queries = model.kv_channels * model.num_attention_heads
    keys = model.kv_channels * model.num_query_groups
    scores = 2 * queries * model.seq_length * _SEEN_FRAC
    return model.hidden_size * ((2 + model.has_attention_gate) * queries + 2 * keys) + scores


def _latent(model: ModelShape, latent: LatentAttention) -> float:
    """Return multiply-adds, including norms of compressed queries and keys, as Megatron counts."""
    heads, hidden = model.num_attention_heads, model.hidden_size
    width = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)
    queries = hidden * width
    if latent.q_lora_rank:
        queries = latent.q_lora_rank * (hidden + width + 1)
    values = heads * latent.v_head_dim
    keys = latent.kv_lora_rank * (hidden + heads * latent.qk_head_dim + values + 1)
    keys += hidden * latent.qk_pos_emb_head_dim
    scores = model.seq_length * (width + values) * _SEEN_FRAC
    return queries + keys + values * hidden + scores


def _head(model: ModelShape) -> int:
    """Return multiply-adds of the logits of the model and of each prediction layer, plus the
    projection and norms of the latter."""
    hidden, ahead = model.hidden_size, model.num_prediction_layers
    return hidden * model.vocab_size * (1 + ahead) + ahead * (3 * hidden + 2 * hidden**2)
