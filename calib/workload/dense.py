"""Pieces of a dense GPT: attention, MLP, embedding and head, as Megatron runs them."""

from __future__ import annotations

from .collectives import Collective, CollectiveUse, GroupRole, Placement
from .config import PositionEmbedding, RunConfig
from .operators import OperatorKind
from .pieces import (
    Piece,
    Shaped,
    column_uses,
    hidden_call,
    linear_tensors,
    local_tokens,
    norm_piece,
    row_uses,
    tokens_of,
)
from .ranks import group_call
from .tensors import ParameterTensor


def attention_piece(config: RunConfig) -> Piece:
    """Query, key and value product, positions, core attention and projection."""
    model, tp = config.model, config.parallelism.tp
    tokens, hidden, channels = tokens_of(config), model.hidden_size, model.kv_channels
    heads, groups = model.num_attention_heads // tp, model.num_query_groups // tp
    query, qkv = heads * channels, (heads + 2 * groups) * channels
    has_bias = model.has_bias
    return Piece(
        module="attention",
        operators=(
            (OperatorKind.LINEAR_QKV, (tokens, hidden, qkv), 1),
            (OperatorKind.POSITION, (tokens, qkv), 1),
            *core_attention(config, heads, groups),
            (OperatorKind.LINEAR_PROJ, (tokens, query, hidden), 1),
        ),
        uses=(*column_uses(config, OperatorKind.LINEAR_QKV), *row_uses(config)),
        tensors=(
            *linear_tensors("proj", query, hidden, has_bias=has_bias, is_row=True),
            *linear_tensors("qkv", hidden, qkv, has_bias=has_bias or model.has_qkv_bias),
        ),
    )


def core_attention(config: RunConfig, heads: int, groups: int) -> tuple[Shaped, ...]:
    """Core attention of one micro-batch on one rank."""
    shape = (
        config.batch.micro_batch_size,
        heads,
        groups,
        config.local_seq_length,
        config.model.kv_channels,
    )
    return ((OperatorKind.CORE_ATTENTION, shape, 1),)


def mlp_piece(config: RunConfig) -> Piece:
    """A dense MLP."""
    model, tokens = config.model, tokens_of(config)
    hidden, ffn = model.hidden_size, model.ffn_hidden_size // config.parallelism.tp
    fc1 = ffn * (2 if model.is_gated else 1)
    return Piece(
        module="mlp",
        operators=(
            (OperatorKind.LINEAR_FC1, (tokens, hidden, fc1), 1),
            (OperatorKind.ACTIVATION, (tokens, fc1, ffn), 1),
            (OperatorKind.LINEAR_FC2, (tokens, ffn, hidden), 1),
        ),
        uses=(*column_uses(config, OperatorKind.LINEAR_FC1), *row_uses(config)),
        tensors=(
            *linear_tensors("fc1", hidden, fc1, has_bias=model.has_bias),
            *linear_tensors("fc2", ffn, hidden, has_bias=model.has_bias, is_row=True),
        ),
    )


def residual_piece(config: RunConfig) -> Piece:
    """Both bias-dropout-adds of a layer."""
    shape = (local_tokens(config), config.model.hidden_size)
    return Piece(module="residual", operators=((OperatorKind.RESIDUAL, shape, 1),))


def embedding_piece(config: RunConfig) -> Piece:
    """Look-up of words and positions at the start of the first chunk."""
    model, par = config.model, config.parallelism
    vocab = model.vocab_size // par.tp
    tensors = [
        ParameterTensor(
            name="embedding.word",
            numel=vocab * model.hidden_size,
            is_shared_embedding=model.is_tied and par.pp > 1,
        )
    ]
    if model.position_embedding is PositionEmbedding.LEARNED:
        rows = model.max_position_embeddings or model.seq_length
        tensors.append(ParameterTensor(name="embedding.position", numel=rows * model.hidden_size))
    return Piece(
        module="embedding",
        operators=((OperatorKind.EMBEDDING, (tokens_of(config), model.hidden_size, vocab), 1),),
        uses=_embedding_uses(config),
        tensors=tuple(tensors),
    )


def head_piece(config: RunConfig) -> tuple[Piece, ...]:
    """Final norm, logits and loss at the end of the last chunk."""
    model, par = config.model, config.parallelism
    tokens, vocab = tokens_of(config), model.vocab_size // par.tp
    tensors: tuple[ParameterTensor, ...] = ()
    if not model.is_tied or par.pp > 1:
        is_shared = model.is_tied and par.pp > 1
        numel = vocab * model.hidden_size
        tensors = (ParameterTensor(name="output", numel=numel, is_shared_embedding=is_shared),)
    uses = list(column_uses(config, OperatorKind.LOGITS))
    if par.tp > 1:
        # Largest logit, the logit of the target, and the sum of exponentials, in fp32.
        loss = group_call(config, Collective.ALL_REDUCE, GroupRole.TP, tokens * 4)
        uses.append(CollectiveUse(call=loss, count=3, placement=Placement.FORWARD))
    head = Piece(
        module="head",
        operators=(
            (OperatorKind.LOGITS, (tokens, model.hidden_size, vocab), 1),
            (OperatorKind.LOSS, (tokens, vocab), 1),
        ),
        uses=tuple(uses),
        tensors=tensors,
    )
    return norm_piece(config, "final_norm"), head


def _embedding_uses(config: RunConfig) -> tuple[CollectiveUse, ...]:
    if config.parallelism.tp == 1:
        return ()
    if not config.parallelism.is_sequence_parallel:
        call = hidden_call(config, Collective.ALL_REDUCE)
        return (CollectiveUse(call=call, count=1, placement=Placement.FORWARD),)
    # With learned positions Megatron reduces in full and then splits; otherwise it scatters.
    is_split = config.model.position_embedding is PositionEmbedding.LEARNED
    kind = Collective.ALL_REDUCE if is_split else Collective.REDUCE_SCATTER
    return (
        CollectiveUse(call=hidden_call(config, kind), count=1, placement=Placement.FORWARD),
        CollectiveUse(
            call=hidden_call(config, Collective.ALL_GATHER), count=1, placement=Placement.BACKWARD
        ),
    )
