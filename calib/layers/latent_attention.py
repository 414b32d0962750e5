"""Layer modules of multi-latent attention (DeepSeek-V2, 2024, section 2.1) as Megatron runs it.

Queries, and keys with values, pass through a narrow latent each: a down projection, a norm, and an
up projection that is split over tp by heads.  A part of each key carries the position; it leaves
the down projection directly and is shared by all heads.  Down projections are TransformerEngine's:
the local layers of ``megatron.core`` 0.16.1 do not run latent attention.
"""

from __future__ import annotations

from dataclasses import replace

from ..workload.collectives import Collective, CollectiveUse, Placement
from ..workload.config import LatentAttention, RunConfig
from ..workload.operators import OperatorKind
from .context_parallel import context_uses, core_attention
from .layer_modules import (
    LayerModule,
    Shaped,
    column_uses,
    hidden_call,
    linear_tensors,
    local_tokens,
    norm_kind,
    norm_tensors,
    row_uses,
    tokens_of,
    transfer,
)
from .tensors import ParameterTensor


def latent_attention_modules(config: RunConfig) -> tuple[LayerModule, ...]:
    """Down projections and norms, up projections and positions, core attention and projection.

    The first one holds all tensors, in the order of ``named_parameters()``.
    """
    latent, model = _latent(config), config.model
    tokens, heads = tokens_of(config), model.num_attention_heads // config.parallelism.tp
    query, value = latent.qk_head_dim + latent.qk_pos_emb_head_dim, latent.v_head_dim
    norms = _latent_norms(config)
    is_inside = config.has_norms_inside
    up = LayerModule(
        module="mla_up_proj",
        operators=(
            *(norms if is_inside else ()),
            *((OperatorKind.LINEAR, (tokens, *sizes), 1) for sizes in _up_sizes(config)),
            # Each head of the queries, and once the keys of all heads.
            (OperatorKind.POSITION, (tokens, (heads + 1) * latent.qk_pos_emb_head_dim), 1),
        ),
        uses=tuple(
            use
            for width, _ in _up_sizes(config)
            for use in column_uses(config, OperatorKind.LINEAR, width=width)
        ),
    )
    core = LayerModule(
        module="attention",
        operators=(
            # As many operations and bytes as with heads of the mean of both widths.
            *core_attention(config, heads, heads, (query + value) // 2),
            (OperatorKind.LINEAR_PROJ, (tokens, heads * value, model.hidden_size), 1),
        ),
        uses=(
            *context_uses(
                config,
                query_width=heads * query,
                key_width=heads * query,
                value_width=heads * value,
            ),
            *row_uses(config, OperatorKind.LINEAR_PROJ),
        ),
    )
    return _down_module(config, () if is_inside else norms), up, core


def _latent(config: RunConfig) -> LatentAttention:
    latent = config.model.latent_attention
    if latent is None:
        raise AssertionError("latent attention was asked of a model that has none")
    return latent


def _latent_norms(config: RunConfig) -> tuple[Shaped, ...]:
    """The norm of each latent before its up projection, inside which Transformer Engine runs it."""
    latent, tokens = _latent(config), local_tokens(config)
    if not config.model.has_qk_norm:
        return ()
    widths = [width for width in (latent.q_lora_rank, latent.kv_lora_rank) if width]
    return tuple((norm_kind(config), (tokens, width), 1) for width in widths)


def _down_module(config: RunConfig, norms: tuple[Shaped, ...]) -> LayerModule:
    """Down projections are whole on every rank; what carries the position is then gathered."""
    latent, hidden, tokens = _latent(config), config.model.hidden_size, local_tokens(config)
    downs = [latent.kv_lora_rank + latent.qk_pos_emb_head_dim]
    if latent.q_lora_rank:
        downs = [latent.q_lora_rank, *downs]
    operators: list[Shaped] = [(OperatorKind.LINEAR, (tokens, hidden, width), 1) for width in downs]
    return LayerModule(
        module="attention",
        operators=(*operators, *norms),
        uses=_position_uses(config),
        tensors=_tensors(config),
    )


def _position_uses(config: RunConfig) -> tuple[CollectiveUse, ...]:
    if config.parallelism.tp == 1 or not config.parallelism.is_sequence_parallel:
        return ()
    width = _latent(config).qk_pos_emb_head_dim
    gather = hidden_call(config, Collective.ALL_GATHER, width)
    scatter = hidden_call(config, Collective.REDUCE_SCATTER, width)
    return transfer(gather, Placement.FORWARD), transfer(scatter, Placement.BACKWARD)


def _up_sizes(config: RunConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Input and output of the two column-parallel products: queries, then keys with values."""
    latent, model = _latent(config), config.model
    heads = model.num_attention_heads // config.parallelism.tp
    query = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)
    both = heads * (latent.qk_head_dim + latent.v_head_dim)
    return (latent.q_lora_rank or model.hidden_size, query), (latent.kv_lora_rank, both)


def _tensors(config: RunConfig) -> tuple[ParameterTensor, ...]:
    latent, model = _latent(config), config.model
    heads = model.num_attention_heads // config.parallelism.tp
    query_up, kv_up = _up_sizes(config)
    down = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
    tensors = [
        *linear_tensors(
            "proj",
            heads * latent.v_head_dim,
            model.hidden_size,
            has_bias=model.has_bias,
            is_row=True,
        ),
        *(_down_tensors(config, "q_down", latent.q_lora_rank) if latent.q_lora_rank else ()),
        *linear_tensors("q_up", *query_up, has_bias=False),
        *_down_tensors(config, "kv_down", down),
        *linear_tensors("kv_up", *kv_up, has_bias=False),
    ]
    if model.has_qk_norm:
        if latent.q_lora_rank:
            tensors += norm_tensors(config, "q_norm", latent.q_lora_rank)
        tensors += norm_tensors(config, "kv_norm", latent.kv_lora_rank)
    return tuple(tensors)


def _down_tensors(config: RunConfig, name: str, width: int) -> tuple[ParameterTensor, ...]:
    """Every rank has all of it, and under sequence parallelism sees a part of the sequence."""
    found = linear_tensors(name, config.model.hidden_size, width, has_bias=False)
    return tuple(replace(tensor, is_sequence_parallel=True) for tensor in found)
