"""Layer modules of a dense GPT: attention, MLP, embedding and head, as Megatron runs them.

Context parallelism splits core attention over ranks.  Its traffic follows
``AttnFuncWithCPAndKVP2P``, ``...QKVOA2A`` and ``...KVAllGather`` of TransformerEngine 2 for causal
attention, the first also between groups whose ranks exchange heads (``a2a+p2p``): each rank has two
of 2 cp parts of the sequence, one from either end, so that all have equal work.

Multi-latent attention (DeepSeek-V2, 2024, section 2.1) follows Megatron too.  Queries, and keys
with values, each pass through a narrow latent: a down projection, a norm, and an up projection that
is split over tp by heads.  A part of each key carries the position; it comes directly from the down
projection and is shared by all heads.  Down projections are TransformerEngine's: the local layers
of ``megatron.core`` 0.16.1 do not run latent attention.
"""

from __future__ import annotations

from dataclasses import replace

from ..workload.collectives import Collective, CollectiveUse, GroupRole, Placement
from ..workload.config import RunConfig
from ..workload.model_shape import LatentAttention, OpaqueLayer, PositionEmbedding
from ..workload.operators import OPAQUE_OPERATORS, OperatorKind
from ..workload.parallelism import ContextComm
from ..workload.ranks import group, group_call
from .layer_modules import (
    LayerModule,
    Shaped,
    column_uses,
    hidden_call,
    linear_tensors,
    local_tokens,
    norm_kind,
    norm_module,
    norm_tensors,
    row_uses,
    tokens_of,
    transfer,
)
from .tensors import ParameterTensor


def core_attention(
    config: RunConfig, heads: int, groups: int, channels: int = 0
) -> tuple[Shaped, ...]:
    """Return core attention of one micro-batch on one rank; ``channels``: of a head, if not
    kv_channels.

    With all-to-all a rank has some of the heads and the whole sequence, or that of its neighbours.
    Otherwise it runs one block per part of the sequence: its own, which is causal, and others that
    are half as large and unmasked, which is the same work; so n parts count as n causal calls at
    seq / n.
    """
    par, model = config.parallelism, config.model
    inner = par.exchanged_cp
    num_parts = par.cp // inner
    shape = (
        *(config.batch.micro_batch_size, heads // inner, groups // inner),
        *(model.seq_length // num_parts, channels or model.kv_channels),
    )
    return ((OperatorKind.CORE_ATTENTION, shape, num_parts),)


def context_uses(
    config: RunConfig, *, query_width: int, key_width: int, value_width: int
) -> tuple[CollectiveUse, ...]:
    """Return the transfers of attention over cp; widths are those of a token on one rank.

    Point to point: keys and values go round the ring cp - 1 times, overlapping the blocks, and in
    the backward pass their gradients with them.  Each send comes with a simultaneous receive of the
    same size from the other neighbour, which is not listed.  All-to-all: queries, keys, values and
    output, and in the backward pass the gradients of each.  A ring of groups has both, at the same
    bytes: keys and values of all neighbours, of fewer heads.  All-gather: keys and values in both
    passes; the backward pass also scatters their gradients.
    """
    if config.parallelism.cp == 1:
        return ()
    par, nbytes = config.parallelism, tokens_of(config) * config.precision.nbytes
    forward, backward = Placement.FORWARD, Placement.BACKWARD
    if par.context_comm is ContextComm.ALL_GATHER:
        whole = nbytes * par.cp
        return tuple(
            _use(config, collective, whole * width, placement)
            for collective, placement in (
                (Collective.ALL_GATHER, forward),
                (Collective.ALL_GATHER, backward),
                (Collective.REDUCE_SCATTER, backward),
            )
            for width in (key_width, value_width)
        )
    uses: list[CollectiveUse] = []
    if par.exchanged_cp > 1:
        widths = (query_width, key_width, value_width, value_width * query_width // key_width)
        uses += [
            _use(config, Collective.ALL_TO_ALL, nbytes * width, placement)
            for placement in (forward, backward)
            for width in widths
        ]
    if rounds := par.cp // par.exchanged_cp - 1:
        both = nbytes * (key_width + value_width)
        send = group_call(config, Collective.SEND, GroupRole.CP, both)
        use = replace(transfer(send, forward, OperatorKind.CORE_ATTENTION), count=rounds)
        uses += [use, replace(use, placement=backward, count=2 * rounds)]
    return tuple(uses)


def _use(
    config: RunConfig, collective: Collective, nbytes: int, placement: Placement
) -> CollectiveUse:
    call = group_call(config, collective, GroupRole.CP, nbytes)
    par = config.parallelism
    if collective is Collective.ALL_TO_ALL and par.exchanged_cp < par.cp:
        ranks = group(par, GroupRole.CP, 0)[: par.exchanged_cp]
        nodes = len({rank // par.ranks_per_node for rank in ranks}) if par.ranks_per_node else 1
        call = replace(call, num_ranks=len(ranks), num_nodes=nodes)
    return transfer(call, placement)


def attention_module(config: RunConfig) -> LayerModule:
    """Return the QKV product, positions, core attention and projection.

    The product of attention's output with its gates is omitted, as small.
    """
    model, tp = config.model, config.parallelism.tp
    tokens, hidden, channels = tokens_of(config), model.hidden_size, model.kv_channels
    heads, groups = model.num_attention_heads // tp, max(1, model.num_query_groups // tp)
    query, key = heads * channels, groups * channels
    parts = model.num_attention_heads * (1 + model.has_attention_gate) + 2 * model.num_query_groups
    qkv = parts * channels // tp
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
            # A parallel branch is reduced together with that of the MLP.
            *(() if model.is_residual_parallel else row_uses(config, OperatorKind.LINEAR_PROJ)),
        ),
        tensors=(
            *linear_tensors("proj", query, hidden, has_bias=has_bias, is_row=True),
            *linear_tensors("qkv", hidden, qkv, has_bias=has_bias or model.has_qkv_bias),
            *norm_weights,
        ),
    )


def _shared_group_uses(config: RunConfig, qkv: int) -> tuple[CollectiveUse, ...]:
    """Return the gather of all queries, keys and values, needed if ranks share a query group.

    ``qkv``: width of one rank's output of the product.
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
    """Return the norms of each head's queries and keys; their weights are replicated over tp."""
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
    """Return a dense MLP, of a dense layer or of shared experts; ``width``: over all tp ranks."""
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
    """Return both bias-dropout-adds of a layer."""
    shape = (local_tokens(config), config.model.hidden_size)
    return LayerModule(module="residual", operators=((OperatorKind.RESIDUAL, shape, 1),))


def embedding_module(config: RunConfig) -> LayerModule:
    """Return the look-up of words and positions at the start of the first chunk."""
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
        # Megatron's table has a row for each position of the longest sequence that the model takes.
        rows = model.max_position_embeddings or model.seq_length
        tensors.append(ParameterTensor(name="embedding.position", numel=rows * model.hidden_size))
    return LayerModule(
        module="embedding",
        operators=((OperatorKind.EMBEDDING, (tokens_of(config), model.hidden_size, vocab), 1),),
        uses=_embedding_uses(config),
        tensors=tuple(tensors),
    )


def head_module(config: RunConfig) -> tuple[LayerModule, ...]:
    """Return the final norm, and logits with loss, at the end of the last chunk."""
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
    """Return the all-reduces of the largest logit, the target's logit and the sum of exponentials,
    in fp32.

    The fused loss combines the last two (``fused_vocab_parallel_cross_entropy``).
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


def latent_attention_modules(config: RunConfig) -> tuple[LayerModule, ...]:
    """Return down projections and norms, up projections and positions, core attention and output.

    The first module has all tensors, in the order of ``named_parameters()``.
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
            # Each query head, and one key part that all heads share.
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
            # The mean of both widths gives the same number of operations and bytes.
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
        raise AssertionError("latent attention was requested of a model that has none")
    return latent


def _latent_norms(config: RunConfig) -> tuple[Shaped, ...]:
    """Return the norm of each latent before its up projection, which may run it inside."""
    latent, tokens = _latent(config), local_tokens(config)
    if not config.model.has_qk_norm:
        return ()
    widths = [width for width in (latent.q_lora_rank, latent.kv_lora_rank) if width]
    return tuple((norm_kind(config), (tokens, width), 1) for width in widths)


def _down_module(config: RunConfig, norms: tuple[Shaped, ...]) -> LayerModule:
    """Return the down projections, replicated over tp; the position part is gathered after them."""
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
    """Return (input, output) widths of the two column-parallel products: queries, then keys with
    values."""
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
    """Return the tensors of a down projection, replicated over tp; under sequence parallelism each
    rank's gradient covers only its part of the sequence."""
    tensors = linear_tensors(name, config.model.hidden_size, width, has_bias=False)
    return tuple(replace(tensor, is_sequence_parallel=True) for tensor in tensors)


def opaque_module(config: RunConfig, layer: OpaqueLayer) -> LayerModule:
    """Return the mixer of an opaque layer: one operator, between column- and row-parallel products
    whose transfers are those of attention."""
    tp, tokens = config.parallelism.tp, tokens_of(config)
    numel, kind = layer.split_numel // tp, OPAQUE_OPERATORS[layer.symbol]
    return LayerModule(
        module="",
        operators=((kind, (tokens, numel + layer.whole_numel), 1),),
        uses=(*column_uses(config, kind), *row_uses(config, kind)),
        tensors=tuple(
            ParameterTensor(name=f"mixer.{name}", numel=size, is_quantized=name == "weight")
            for name, size in (("weight", numel), ("whole", layer.whole_numel))
            if size
        ),
    )
