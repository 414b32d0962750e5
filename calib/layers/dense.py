"""Layer modules of a dense GPT: attention, MLP, embedding and head, as Megatron runs them."""

from __future__ import annotations

from dataclasses import replace

from ..workload.collectives import Collective, CollectiveUse, GroupRole, Placement
from ..workload.config import PositionEmbedding, RunConfig
from ..workload.operators import OperatorKind
from ..workload.ranks import group_call
from .context_parallel import context_uses, core_attention
from .layer_modules import (
    LayerModule,
    Shaped,
    column_uses,
    hidden_call,
    linear_tensors,
    local_tokens,
    norm_module,
    norm_tensors,
    row_uses,
    tokens_of,
    transfer,
)
from .tensors import ParameterTensor


def attention_module(config: RunConfig) -> LayerModule:
    """Query, key and value product, positions, core attention and projection."""
    model, tp = config.model, config.parallelism.tp
    tokens, hidden, channels = tokens_of(config), model.hidden_size, model.kv_channels
    heads, groups = model.num_attention_heads // tp, max(1, model.num_query_groups // tp)
    query, key = heads * channels, groups * channels
    qkv = (model.num_attention_heads + 2 * model.num_query_groups) * channels // tp
    has_bias = model.has_bias
    norms, norm_weights = _query_key_norms(config, heads, groups)
    return LayerModule(
        module="attention",
        operators=(
            (OperatorKind.LINEAR_QKV, (tokens, hidden, qkv), 1),
            (OperatorKind.POSITION, (tokens, qkv), 1),
            *norms,
            *core_attention(config, heads, groups),
            (OperatorKind.LINEAR_PROJ, (tokens, query, hidden), 1),
        ),
        uses=(
            *column_uses(config, OperatorKind.LINEAR_QKV),
            *_shared_group_uses(config, qkv),
            *context_uses(config, query_width=query, key_width=key, value_width=key),
            # A parallel branch is summed with that of the MLP.
            *(() if model.is_residual_parallel else row_uses(config, OperatorKind.LINEAR_PROJ)),
        ),
        tensors=(
            *linear_tensors("proj", query, hidden, has_bias=has_bias, is_row=True),
            *linear_tensors("qkv", hidden, qkv, has_bias=has_bias or model.has_qkv_bias),
            *norm_weights,
        ),
    )


def _shared_group_uses(config: RunConfig, qkv: int) -> tuple[CollectiveUse, ...]:
    """Where ranks share a query group, each gathers all queries, keys and values and picks its own.

    ``qkv``: width of what one rank has made.
    """
    tp = config.parallelism.tp
    if config.model.num_query_groups >= tp:
        return ()
    nbytes = tokens_of(config) * qkv * tp * config.precision.nbytes
    gather = group_call(config, Collective.ALL_GATHER, GroupRole.TP, nbytes)
    scatter = replace(gather, collective=Collective.REDUCE_SCATTER)
    return transfer(gather, Placement.FORWARD), transfer(scatter, Placement.BACKWARD)


def _query_key_norms(
    config: RunConfig, heads: int, groups: int
) -> tuple[tuple[Shaped, ...], tuple[ParameterTensor, ...]]:
    """Norms of each head's queries and keys; every tp rank holds their weights."""
    if not config.model.has_qk_norm:
        return (), ()
    tokens, channels = tokens_of(config), config.model.kv_channels
    tensors = (
        replace(tensor, is_sequence_parallel=False, is_head_parallel=True)
        for name in ("query_norm", "key_norm")
        for tensor in norm_tensors(config, name, channels)
    )
    operators: tuple[Shaped, ...] = (
        (OperatorKind.NORM, (tokens * heads, channels), 1),
        (OperatorKind.NORM, (tokens * groups, channels), 1),
    )
    return operators, tuple(tensors)


def mlp_module(config: RunConfig, module: str, width: int, *, has_bias: bool) -> LayerModule:
    """A dense MLP of that width over all tp ranks, dense layers' or that of shared experts."""
    tokens, hidden = tokens_of(config), config.model.hidden_size
    ffn = width // config.parallelism.tp
    fc1 = ffn * (2 if config.model.is_gated else 1)
    return LayerModule(
        module=module,
        operators=(
            (OperatorKind.LINEAR_FC1, (tokens, hidden, fc1), 1),
            (OperatorKind.ACTIVATION, (tokens, fc1, ffn), 1),
            (OperatorKind.LINEAR_FC2, (tokens, ffn, hidden), 1),
        ),
        uses=(
            *column_uses(config, OperatorKind.LINEAR_FC1),
            *row_uses(config, OperatorKind.LINEAR_FC2),
        ),
        tensors=(
            *linear_tensors(f"{module}.fc1", hidden, fc1, has_bias=has_bias),
            *linear_tensors(f"{module}.fc2", ffn, hidden, has_bias=has_bias, is_row=True),
        ),
    )


def residual_module(config: RunConfig) -> LayerModule:
    """Both bias-dropout-adds of a layer."""
    shape = (local_tokens(config), config.model.hidden_size)
    return LayerModule(module="residual", operators=((OperatorKind.RESIDUAL, shape, 1),))


def embedding_module(config: RunConfig) -> LayerModule:
    """Look-up of words and positions at the start of the first chunk."""
    model, par = config.model, config.parallelism
    vocab = model.vocab_size // par.tp
    tensors = [
        ParameterTensor(
            name="embedding.word",
            numel=vocab * model.hidden_size,
            is_shared_embedding=par.pp > 1 and (model.is_tied or model.num_prediction_layers > 0),
        )
    ]
    if model.position_embedding is PositionEmbedding.LEARNED:
        # Megatron makes the table as long as the longest sequence that the model takes.
        rows = model.max_position_embeddings or model.seq_length
        tensors.append(ParameterTensor(name="embedding.position", numel=rows * model.hidden_size))
    return LayerModule(
        module="embedding",
        operators=((OperatorKind.EMBEDDING, (tokens_of(config), model.hidden_size, vocab), 1),),
        uses=_embedding_uses(config),
        tensors=tuple(tensors),
    )


def head_module(config: RunConfig) -> tuple[LayerModule, ...]:
    """Final norm, logits and loss at the end of the last chunk."""
    model, par = config.model, config.parallelism
    tokens, vocab = tokens_of(config), model.vocab_size // par.tp
    tensors: tuple[ParameterTensor, ...] = ()
    if not model.is_tied or par.pp > 1:
        # With prediction layers the last stage shares its copy of the table instead.
        is_shared = model.is_tied and par.pp > 1 and not model.num_prediction_layers
        numel = vocab * model.hidden_size
        tensors = (ParameterTensor(name="output", numel=numel, is_shared_embedding=is_shared),)
    head = LayerModule(
        module="head",
        operators=(
            (OperatorKind.LOGITS, (tokens, model.hidden_size, vocab), 1),
            (OperatorKind.LOSS, (tokens, vocab), 1),
        ),
        uses=(
            *column_uses(config, OperatorKind.LOGITS, is_in_layer=False),
            *_loss_uses(config),
        ),
        tensors=tensors,
    )
    return norm_module(config, "final_norm", module="head"), head


def _loss_uses(config: RunConfig) -> tuple[CollectiveUse, ...]:
    """Largest logit, the target's logit and the sum of exponentials, in fp32.

    Fused, the last two travel together (``fused_vocab_parallel_cross_entropy``).
    """
    if config.parallelism.tp == 1:
        return ()
    sizes = (1, 2) if config.is_loss_fused else (1, 1, 1)
    return tuple(
        transfer(
            group_call(config, Collective.ALL_REDUCE, GroupRole.TP, tokens_of(config) * 4 * size),
            Placement.FORWARD,
        )
        for size in sizes
    )


def _embedding_uses(config: RunConfig) -> tuple[CollectiveUse, ...]:
    if config.parallelism.tp == 1:
        return ()
    if not config.parallelism.is_sequence_parallel:
        return (transfer(hidden_call(config, Collective.ALL_REDUCE), Placement.FORWARD),)
    # With learned positions Megatron reduces in full and then splits; otherwise it scatters.
    is_split = config.model.position_embedding is PositionEmbedding.LEARNED
    kind = Collective.ALL_REDUCE if is_split else Collective.REDUCE_SCATTER
    return (
        transfer(hidden_call(config, kind), Placement.FORWARD),
        transfer(hidden_call(config, Collective.ALL_GATHER), Placement.BACKWARD),
    )
