"""Blocks of layer modules that a layout cuts a model into: work of one micro-batch on one rank.

A block depends on the model, the micro-batch and the degrees that split a layer, not on the number
of stages or replicas: layouts that differ in those share their blocks.

The layer modules of multi-token prediction (DeepSeek-V3, 2024, section 2.2) follow Megatron: each
prediction layer concatenates the hidden states with the embedding of a token further ahead, halves
the width, runs one transformer layer of the same kind as the model's last, and adds its own logits
and loss.  It uses the model's embedding and output head; the last stage has a copy of the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ..workload.argument_values import QuickEnum
from ..workload.collectives import Collective, CollectiveUse, GroupRole, OtherPass, Placement
from ..workload.config import Fp8Recipe, Recompute, RunConfig, switch_values
from ..workload.model_shape import (
    ATTENTION_SYMBOLS,
    EXPERTS_SYMBOL,
    MLP_SYMBOL,
    ModelShape,
    OpaqueLayer,
)
from ..workload.operators import Operator, OperatorCount, OperatorKind, Phase
from ._dense import (
    attention_module,
    embedding_module,
    head_module,
    latent_attention_modules,
    mlp_module,
    opaque_module,
    residual_module,
)
from ._experts import expert_modules, overlaps_expert_exchange
from .layer_modules import (
    LayerModule,
    Shaped,
    added_modules,
    column_uses,
    hidden_call,
    linear_tensors,
    local_tokens,
    norm_module,
    tokens_of,
    transfer,
    with_norm,
)
from .recompute import RecomputeOption
from .sharding import has_host_units, shard_key, shard_uses
from .tensors import BlockNumel, ParameterTensor, Strip, block_numel, strip

EMBEDDING = "embedding"
HEAD = "head"
"""Modules that are never recomputed."""


def embedding_copy_module(config: RunConfig) -> LayerModule:
    """Return the embedding table of prediction layers, if the last chunk is not the first."""
    return LayerModule(module=EMBEDDING, tensors=embedding_module(config).tensors)


def prediction_modules(
    config: RunConfig, layer: tuple[LayerModule, ...]
) -> tuple[LayerModule, ...]:
    """Return the final norm of the model and all prediction layers.

    ``layer``: modules of the last transformer layer.

    The norm is included because Megatron places it between the last layer and these.
    """
    final, head = head_module(config)
    each = (
        replace(embedding_module(config), tensors=()),
        norm_module(config, "embedding_norm"),
        norm_module(config, "hidden_norm"),
        _join_module(config),
        *layer,
        norm_module(config, "prediction_norm"),
        replace(head, tensors=()),
    )
    return (final, *each * config.model.num_prediction_layers)


def _join_module(config: RunConfig) -> LayerModule:
    """Return the concatenation and the column-parallel projection, whose result is gathered."""
    hidden, tp = config.model.hidden_size, config.parallelism.tp
    return LayerModule(
        module="eh_proj",
        operators=(
            (OperatorKind.ELEMENTWISE, (local_tokens(config), 2 * hidden), 1),
            (OperatorKind.LINEAR, (tokens_of(config), 2 * hidden, hidden // tp), 1),
        ),
        uses=(*column_uses(config, OperatorKind.LINEAR, width=2 * hidden), *_gather_uses(config)),
        tensors=linear_tensors("join", 2 * hidden, hidden // tp, has_bias=False),
    )


def _gather_uses(config: RunConfig) -> tuple[CollectiveUse, ...]:
    if config.parallelism.tp == 1:
        return ()
    forward = transfer(hidden_call(config, Collective.ALL_GATHER), Placement.FORWARD)
    if not config.parallelism.is_sequence_parallel:
        return (forward,)
    return forward, replace(forward, placement=Placement.BACKWARD)


class BlockKind(QuickEnum):
    """Kind of a block, in model order."""

    EMBEDDING = "embedding"
    LAYER = "layer"
    EXPERT_LAYER = "expert_layer"
    ATTENTION = "attention"
    """Layer of a hybrid model, as those down to ``LINEAR_ATTENTION``."""
    MLP = "mlp"
    EXPERTS = "experts"
    MAMBA = "mamba"
    DELTA_NET = "delta_net"
    SPARSE_ATTENTION = "sparse_attention"
    LINEAR_ATTENTION = "linear_attention"
    EMBEDDING_COPY = "embedding_copy"
    """The table alone, before the layers of a last chunk with prediction layers."""
    PREDICTION = "prediction"
    """Final norm and all prediction layers; the head then has no norm."""
    HEAD = "head"


_OPAQUE_KINDS = {
    "M": BlockKind.MAMBA,
    "G": BlockKind.DELTA_NET,
    "D": BlockKind.SPARSE_ATTENTION,
    "L": BlockKind.LINEAR_ATTENTION,
}
_KINDS = {
    **dict.fromkeys(ATTENTION_SYMBOLS, BlockKind.ATTENTION),
    MLP_SYMBOL: BlockKind.MLP,
    EXPERTS_SYMBOL: BlockKind.EXPERTS,
    **_OPAQUE_KINDS,
}
"""Kind of a hybrid model's layer by its symbol."""
LAYER_KINDS = frozenset({BlockKind.LAYER, BlockKind.EXPERT_LAYER, *_KINDS.values()})
"""Kinds of layers."""
EXPERT_KINDS = frozenset({BlockKind.EXPERT_LAYER, BlockKind.EXPERTS})
"""Kinds of layers with experts."""


_PAIRS = {
    (BlockKind.ATTENTION, BlockKind.MLP): BlockKind.LAYER,
    (BlockKind.ATTENTION, BlockKind.EXPERTS): BlockKind.EXPERT_LAYER,
}
"""Neighbours that run as a GPT's layer does, unless they are recomputed one by one."""


def layer_kind(model: ModelShape, layer: int) -> BlockKind:
    """Return the kind of a layer, counted from 0."""
    if model.layer_kinds:
        return _KINDS[model.layer_kinds[layer]]
    return BlockKind.EXPERT_LAYER if model.has_experts(layer) else BlockKind.LAYER


def opaque_of(model: ModelShape, kind: BlockKind) -> OpaqueLayer:
    """Return the opaque layer of a kind, which the model has."""
    return next(one for one in model.opaque_layers if _OPAQUE_KINDS[one.symbol] is kind)


def layer_kinds(model: ModelShape) -> tuple[BlockKind, ...]:
    """Return the kinds of a model's layers, each once, in the order of ``BlockKind``."""
    kinds = {layer_kind(model, layer) for layer in range(model.num_layers)}
    return tuple(kind for kind in BlockKind if kind in kinds)


BufferKey = tuple[bool, bool]
"""Gradient buffer of a parameter: True if of experts, True if its parameters are in 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Work of one micro-batch in one block, and the block's parameters."""

    kind: BlockKind
    forward: tuple[OperatorCount, ...]
    backward: tuple[OperatorCount, ...]
    recompute: tuple[OperatorCount, ...]
    """Forward operators that the backward pass recomputes."""
    num_checkpoints: int
    """Modules whose forward is restarted, each with its own autograd pass."""
    uses: tuple[CollectiveUse, ...]
    tensors: tuple[ParameterTensor, ...]
    numel: BlockNumel
    strips: Mapping[BufferKey, Strip] = field(hash=False)

    @property
    def operators(self) -> tuple[OperatorCount, ...]:
        """Operators of all phases."""
        return (*self.forward, *self.backward, *self.recompute)


BlockCount = tuple[Block, int]
"""A block and its number of consecutive repetitions."""


def block(
    config: RunConfig, kind: BlockKind, *, is_recomputed: bool = False, is_wide: bool = False
) -> Block:
    """Return one block of a layout.

    ``is_recomputed``: it is recomputed as a whole (``FULL``); ``is_wide``: its products stay in 16
    bits (``RunConfig.wide_layers``).
    """
    return _cached(_BlockCacheKey(config), kind, is_recomputed, is_wide)


def block_key(config: RunConfig) -> tuple[Hashable, ...]:
    """Return everything that a block depends on: layouts with equal keys share their blocks."""
    par = config.parallelism
    is_selective = config.recompute is Recompute.SELECTIVE
    return (
        config.model,
        par.tp,
        par.cp,
        par.ep,
        par.etp,
        par.context_comm,
        par.context_inner,
        par.engine,
        par.is_sequence_parallel,
        par.overlaps_tp,
        par.ranks_per_node,
        # With several stages, the embedding table is shared between the first and the last.
        par.pp > 1,
        config.batch.micro_batch_size,
        config.precision,
        config.fp8,
        config.keeps_fp8_params,
        config.is_attention_fused,
        config.has_norms_inside,
        *switch_values(config),
        config.distributes_saved_activations,
        config.recompute_modules or is_selective if is_selective else None,
        shard_key(config),
        overlaps_expert_exchange(config),
        config.uses_cuda_graphs,
        config.cuda_graph_scope,
        config.recomputes_logits,
        _copied(config),
    )


def _copied(config: RunConfig) -> Hashable:
    """Return the settings that only activation copies depend on; None without such copies."""
    experts = config.model.experts
    if not config.offload_modules and not (experts and experts.stash_factor):
        return None
    return config.offload_modules, config.recompute is Recompute.FULL


class _BlockCacheKey:
    """Cache key: a layout that compares equal to every layout with the same blocks."""

    __slots__ = ("config", "key")

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.key = block_key(config)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BlockCacheKey) and self.key == other.key


# Thousands of layouts of a plan share few distinct blocks; each is built once.
@lru_cache(maxsize=4096)
def _cached(
    cache_key: _BlockCacheKey, kind: BlockKind, is_recomputed: bool, is_wide: bool
) -> Block:
    config = cache_key.config
    if not is_wide:
        return _make_block(config, kind, _MODULES[kind](config), is_recomputed)
    config = replace(config, fp8=Fp8Recipe.NONE, keeps_fp8_params=False, wide_layers=(0, 0))
    made = _make_block(config, kind, _MODULES[kind](config), is_recomputed)
    phases = ("forward", "backward", "recompute")
    return replace(made, **{phase: _widened(getattr(made, phase)) for phase in phases})


def _widened(operators: Iterable[OperatorCount]) -> tuple[OperatorCount, ...]:
    return tuple(
        (replace(one, is_wide=True) if one.kind.is_quantized else one, count)
        for one, count in operators
    )


def block_part(
    config: RunConfig, kind: BlockKind, *, is_recomputed: bool, of_experts: bool
) -> Block:
    """Return the operators and transfers of a block in its experts, or outside them, without
    parameters and their sharding, and without transfers that overlap another micro-batch.

    Context parallelism and the micro-batch affect experts only through the tokens of a rank.
    """
    modules = experts = expert_modules(config) if kind in EXPERT_KINDS else ()
    if not of_experts:
        names = {one.module for one in experts}
        modules = tuple(one for one in _MODULES[kind](config) if one.module not in names)
    parts = [
        replace(one, tensors=(), uses=tuple(u for u in one.uses if u.other_pass is OtherPass.NONE))
        for one in modules
    ]
    return _make_block(config, kind, tuple(parts), is_recomputed)


def _make_block(
    config: RunConfig, kind: BlockKind, parts: tuple[LayerModule, ...], is_recomputed: bool
) -> Block:
    nbytes = config.precision.nbytes
    whole = [shaped for part in parts for shaped in part.operators]
    uses = [use for part in parts for use in part.uses]
    recomputed_operators, recompute_uses = _recomputed(config, parts, is_whole=is_recomputed)
    if is_recomputed and config.distributes_saved_activations and config.parallelism.tp > 1:
        recompute_uses.append(
            transfer(hidden_call(config, Collective.ALL_GATHER), Placement.FORWARD)
        )
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    return Block(
        kind=kind,
        forward=(*_counted(whole, Phase.FORWARD, nbytes), *_units(config, kind, Phase.FORWARD)),
        backward=(*_counted(whole, Phase.BACKWARD, nbytes), *_units(config, kind, Phase.BACKWARD)),
        recompute=_counted(recomputed_operators, Phase.RECOMPUTE, nbytes),
        num_checkpoints=_num_checkpoints(config, parts, is_whole=is_recomputed),
        uses=_merge_uses(
            [
                *uses,
                *(replace(use, placement=Placement.RECOMPUTE) for use in recompute_uses),
                # Weights gathered for a backward pass also serve the recompute within it.
                *shard_uses(config, tensors, is_root=kind in _ROOT),
            ]
        ),
        tensors=tensors,
        numel=block_numel(tensors),
        strips=_strips(tensors, has_fp8_params=config.keeps_fp8_params),
    )


def _units(config: RunConfig, kind: BlockKind, phase: Phase) -> tuple[OperatorCount, ...]:
    """Return the host's share of an FSDP2 unit.

    Each layer is a unit; the model around them is one more, to which embedding and head belong.
    """
    if not has_host_units(config) or (kind in _ROOT and kind is not BlockKind.EMBEDDING):
        return ()
    unit = Operator(kind=OperatorKind.SHARD_UNIT, phase=phase, shape=(), element_nbytes=0)
    return ((unit, 1),)


def _strips(
    tensors: tuple[ParameterTensor, ...], *, has_fp8_params: bool
) -> dict[BufferKey, Strip]:
    by_buffer: dict[BufferKey, list[ParameterTensor]] = {}
    for tensor in tensors:
        key = (tensor.is_expert, has_fp8_params and tensor.is_quantized)
        by_buffer.setdefault(key, []).append(tensor)
    return {key: strip(buffer_tensors) for key, buffer_tensors in by_buffer.items()}


BlockVariant = tuple[BlockKind, bool, bool]
"""Kind of a block, True if it is recomputed as a whole, True if its products stay in 16 bits in an
fp8 model."""


def chunk_blocks(config: RunConfig, chunk: int) -> tuple[BlockCount, ...]:
    """Return the blocks of a chunk in model order, equal neighbours merged into one entry."""
    recompute_key = config.recompute, config.recompute_num_layers
    return _chunk(
        _BlockCacheKey(config), chunk, config.chunk_layers, recompute_key, config.wide_layers
    )


# Replicas, buckets and optimizer request the chunks of one layout repeatedly.
@lru_cache(maxsize=8192)
def _chunk(
    cache_key: _BlockCacheKey,
    chunk: int,
    _chunk_layers: tuple[int, ...],
    _recompute_key: tuple[Recompute, int],
    _wide_layers: tuple[int, int],
) -> tuple[BlockCount, ...]:
    return tuple(
        (_cached(cache_key, *variant), count)
        for variant, count in chunk_variants(cache_key.config, chunk)
    )


def chunk_variants(config: RunConfig, chunk: int) -> tuple[tuple[BlockVariant, int], ...]:
    """Return the variants and counts behind ``chunk_blocks``, without building the blocks."""
    variants: list[tuple[BlockVariant, int]] = []
    has_predictions = chunk == config.parallelism.num_chunks - 1 and bool(
        config.model.num_prediction_layers
    )
    if chunk == 0:
        variants.append(((BlockKind.EMBEDDING, False, False), 1))
    elif has_predictions:
        variants.append(((BlockKind.EMBEDDING_COPY, False, False), 1))
    num_recomputed = recomputed_layers(config, chunk)
    variants += _layer_variants(config, chunk, num_recomputed)
    if has_predictions:
        # If only some layers are recomputed (``block``), Megatron recomputes none of these.
        variants.append(((BlockKind.PREDICTION, config.recomputes_all, False), 1))
    if chunk == config.parallelism.num_chunks - 1:
        variants.append(((BlockKind.HEAD, False, False), 1))
    return tuple(variants)


def _layer_variants(
    config: RunConfig, chunk: int, num_recomputed: int
) -> list[tuple[BlockVariant, int]]:
    model = config.model
    is_mixed = model.layer_kinds or (model.experts is not None and model.experts.layer_pattern)
    if not any(config.wide_layers) and not is_mixed:
        kind = BlockKind.LAYER if model.experts is None else BlockKind.EXPERT_LAYER
        counts = ((True, num_recomputed), (False, config.chunk_layers[chunk] - num_recomputed))
        return [((kind, is_recomputed, False), count) for is_recomputed, count in counts if count]
    layers: list[BlockVariant] = []
    for place, layer in enumerate(config.layers_of(chunk)):
        variant = (layer_kind(model, layer), place < num_recomputed, config.is_wide(layer))
        pair = _PAIRS.get((layers[-1][0], variant[0])) if layers else None
        if pair is not None and layers[-1][1:] == variant[1:] == (False, variant[2]):
            layers[-1] = (pair, *variant[1:])
        else:
            layers.append(variant)
    variants: list[tuple[BlockVariant, int]] = []
    for variant in layers:
        if variants and variants[-1][0] == variant:
            variants[-1] = (variant, variants[-1][1] + 1)
        else:
            variants.append((variant, 1))
    return variants


def recomputed_layers(config: RunConfig, chunk: int = 0) -> int:
    """Return the number of layers of a chunk that ``FULL`` recomputes (0 otherwise)."""
    return RecomputeOption.from_config(config).num_covered(config.chunk_layers[chunk])


def layer_modules(config: RunConfig, *, has_experts: bool = False) -> tuple[LayerModule, ...]:
    """Return the modules of a layer with attention and MLP or experts, in the order of
    ``named_parameters()``; in a hybrid model each has a residual sum of its own."""
    if config.model.layer_kinds:
        halves = (BlockKind.ATTENTION, BlockKind.EXPERTS if has_experts else BlockKind.MLP)
        return tuple(module for kind in halves for module in _MODULES[kind](config))
    feed_forward = _experts_modules(config) if has_experts else _mlp_modules(config)
    return (
        *_attention_modules(config),
        *feed_forward,
        *added_modules(config),
        residual_module(config),
    )


def _attention_modules(config: RunConfig) -> tuple[LayerModule, ...]:
    """Return attention with its norm.

    Transformer Engine fuses no norm into a product if several products read its output: latents,
    and the router and the experts (``gpt_layer_specs`` of ``megatron.core`` 0.16.1).
    """
    if config.model.latent_attention is not None:
        return (norm_module(config, "input_norm"), *latent_attention_modules(config))
    return with_norm(config, "input_norm", attention_module(config))


def _experts_modules(config: RunConfig) -> tuple[LayerModule, ...]:
    return (norm_module(config, "mlp_norm"), *expert_modules(config))


def _mlp_modules(config: RunConfig) -> tuple[LayerModule, ...]:
    model = config.model
    mlp = mlp_module(config, "mlp", model.ffn_hidden_size, has_bias=model.has_bias)
    return with_norm(config, "mlp_norm", mlp)


def _hybrid(
    modules: Callable[[RunConfig], tuple[LayerModule, ...]],
) -> Callable[[RunConfig], tuple[LayerModule, ...]]:
    """Return the modules of a hybrid model's layer: a norm, its own, and one residual sum."""

    def made(config: RunConfig) -> tuple[LayerModule, ...]:
        whole = residual_module(config)
        halved = tuple(
            (kind, (-(-n // 2), *rest), one) for kind, (n, *rest), one in whole.operators
        )
        return (*modules(config), replace(whole, operators=halved))

    return made


def _opaque(kind: BlockKind) -> Callable[[RunConfig], tuple[LayerModule, ...]]:
    return lambda config: with_norm(
        config, "input_norm", opaque_module(config, opaque_of(config.model, kind))
    )


def _prediction(config: RunConfig) -> tuple[LayerModule, ...]:
    model = config.model
    if model.prediction_kinds:
        kinds = (_KINDS[symbol] for symbol in model.prediction_kinds)
        inner = tuple(module for kind in kinds for module in _MODULES[kind](config))
        return prediction_modules(config, inner)
    last = layer_kind(model, model.num_layers - 1)
    return prediction_modules(config, _MODULES[last](config))


_MODULES: dict[BlockKind, Callable[[RunConfig], tuple[LayerModule, ...]]] = {
    BlockKind.EMBEDDING: lambda config: (embedding_module(config),),
    BlockKind.LAYER: layer_modules,
    BlockKind.EXPERT_LAYER: lambda config: layer_modules(config, has_experts=True),
    BlockKind.ATTENTION: _hybrid(_attention_modules),
    BlockKind.MLP: _hybrid(_mlp_modules),
    BlockKind.EXPERTS: _hybrid(_experts_modules),
    **{kind: _hybrid(_opaque(kind)) for kind in _OPAQUE_KINDS.values()},
    BlockKind.EMBEDDING_COPY: lambda config: (embedding_copy_module(config),),
    BlockKind.PREDICTION: _prediction,
    BlockKind.HEAD: lambda config: head_module(config)[bool(config.model.num_prediction_layers) :],
}


_KINDS_OF_MODULE = {"core_attn": OperatorKind.CORE_ATTENTION}
"""Modules of ``recompute_modules`` that are a single operator within a layer module."""
_NEVER_RECOMPUTED = frozenset({EMBEDDING, HEAD})
_ROOT = frozenset({BlockKind.EMBEDDING, BlockKind.EMBEDDING_COPY, BlockKind.HEAD})
"""Blocks that FSDP wraps with the model itself."""


def _recomputed(
    config: RunConfig, parts: tuple[LayerModule, ...], *, is_whole: bool
) -> tuple[list[Shaped], list[CollectiveUse]]:
    """Return the operators and forward collectives that are recomputed."""
    modules = RecomputeOption.from_config(config).parts
    kinds = {_KINDS_OF_MODULE[name] for name in modules if name in _KINDS_OF_MODULE}
    if config.recomputes_logits:
        kinds.add(OperatorKind.LOGITS)
    operators: list[Shaped] = []
    uses: list[CollectiveUse] = []
    for one in parts:
        forward = [use for use in one.uses if use.placement is Placement.FORWARD]
        if (is_whole and one.module not in _NEVER_RECOMPUTED) or one.module in modules:
            operators += one.operators
            uses += forward
        else:
            operators += [shaped for shaped in one.operators if shaped[0] in kinds]
            if OperatorKind.CORE_ATTENTION in kinds:
                uses += [use for use in forward if use.call.role is GroupRole.CP]
    return operators, uses


def _num_checkpoints(config: RunConfig, parts: tuple[LayerModule, ...], *, is_whole: bool) -> int:
    if is_whole:
        return 1
    names = RecomputeOption.from_config(config).names
    kinds = {_KINDS_OF_MODULE[name] for name in names if name in _KINDS_OF_MODULE}
    of_parts = sum(one.module in names for one in parts)
    return of_parts + sum(shaped[0] in kinds for one in parts for shaped in one.operators)


def _counted(shaped: Iterable[Shaped], phase: Phase, nbytes: int) -> tuple[OperatorCount, ...]:
    counts: Counter[tuple[OperatorKind, tuple[int, ...]]] = Counter()
    for kind, shape, count in shaped:
        counts[kind, shape] += count
    return tuple(
        (Operator(kind=kind, phase=phase, shape=shape, element_nbytes=nbytes), count)
        for (kind, shape), count in counts.items()
        if count
    )


def _merge_uses(uses: Iterable[CollectiveUse]) -> tuple[CollectiveUse, ...]:
    counts: Counter[CollectiveUse] = Counter()
    for use in uses:
        counts[use if use.count == 1 else replace(use, count=1)] += use.count
    return tuple(
        use if count == 1 else replace(use, count=count) for use, count in counts.items() if count
    )
