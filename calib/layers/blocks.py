"""The blocks of layer modules that a layout cuts a model into: work of one micro-batch on one rank.

A block depends on the model, the micro-batch and the degrees that split a layer, not on the number
of stages or replicas: layouts that differ in those share their blocks.

Layer modules of multi-token prediction (DeepSeek-V3, 2024, section 2.2) as Megatron runs it.

Each prediction layer joins the hidden states with the embedding of a token further ahead, halves
the width, runs one transformer layer of the kind of the last, and adds logits and a loss of its
own.  Embedding and output head are those of the model; the last stage holds a copy of the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ..workload import (
    Collective,
    CollectiveUse,
    Fp8Recipe,
    GroupRole,
    Operator,
    OperatorCount,
    OperatorKind,
    OtherPass,
    Phase,
    Placement,
    QuickEnum,
    Recompute,
    RunConfig,
    switch_values,
)
from .again import Again
from .dense import (
    attention_module,
    embedding_module,
    head_module,
    latent_attention_modules,
    mlp_module,
    residual_module,
)
from .experts import exchanges_beside, expert_modules
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
from .sharding import has_host_units, shard_key, shard_uses
from .tensors import BlockNumel, ParameterTensor, Strip, block_numel, strip

EMBEDDING = "embedding"
HEAD = "head"
"""Modules that are never computed again."""


def embedding_copy_module(config: RunConfig) -> LayerModule:
    """The table that prediction layers look up where the last chunk is not the first."""
    return LayerModule(module=EMBEDDING, tensors=embedding_module(config).tensors)


def prediction_modules(
    config: RunConfig, layer: tuple[LayerModule, ...]
) -> tuple[LayerModule, ...]:
    """The final norm of the model, and all prediction layers; ``layer`` are the last layer's.

    The norm is here because Megatron holds it between the last layer and these.
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
    """Concatenation, and the projection of both halves: column-parallel, its result gathered."""
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
    """What a block is, in the order in which a model has them."""

    EMBEDDING = "embedding"
    LAYER = "layer"
    EXPERT_LAYER = "expert_layer"
    EMBEDDING_COPY = "embedding_copy"
    """The table alone, before the layers of a last chunk that predicts further tokens."""
    PREDICTION = "prediction"
    """Final norm and all prediction layers; the head then has no norm."""
    HEAD = "head"


BufferKey = tuple[bool, bool]
"""Whether a gradient buffer is that of experts, and whether its parameters are kept in 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Work of one micro-batch in one block, and the parameters that it holds."""

    kind: BlockKind
    forward: tuple[OperatorCount, ...]
    backward: tuple[OperatorCount, ...]
    recompute: tuple[OperatorCount, ...]
    """Forward operators that run again within the backward pass."""
    num_checkpoints: int
    """Modules whose forward is started again, each with an autograd pass of its own."""
    uses: tuple[CollectiveUse, ...]
    tensors: tuple[ParameterTensor, ...]
    numel: BlockNumel
    strips: Mapping[BufferKey, Strip] = field(hash=False)

    @property
    def operators(self) -> tuple[OperatorCount, ...]:
        """Those of every phase."""
        return (*self.forward, *self.backward, *self.recompute)


BlockCount = tuple[Block, int]
"""A block and how many of it follow one another."""


def block(
    config: RunConfig, kind: BlockKind, *, is_recomputed: bool = False, is_wide: bool = False
) -> Block:
    """One block of a layout.  ``is_recomputed``: the whole of it runs again (``FULL``);
    ``is_wide``: its products stay in 16 bits (``RunConfig.wide_layers``)."""
    return _cached(_Asked(config), kind, is_recomputed, is_wide)


def block_key(config: RunConfig) -> tuple[Hashable, ...]:
    """Everything that a block depends on: layouts with equal keys share their blocks."""
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
        # The table is shared over stages where there are several.
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
        exchanges_beside(config),
        config.uses_cuda_graphs,
        config.cuda_graph_scope,
        _copied(config),
    )


def _copied(config: RunConfig) -> Hashable:
    """What copies of activations depend on beyond the rest; None where there are none."""
    experts = config.model.experts
    if not config.offload_modules and not (experts and experts.stash_factor):
        return None
    return config.offload_modules, config.recompute is Recompute.FULL


class _Asked:
    """A layout that equals every other one with the same blocks."""

    __slots__ = ("config", "key")

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.key = block_key(config)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and self.key == other.key


# Thousands of layouts of a plan share few distinct blocks; each is made once.
@lru_cache(maxsize=4096)
def _cached(asked: _Asked, kind: BlockKind, is_recomputed: bool, is_wide: bool) -> Block:
    config = asked.config
    if not is_wide:
        return _made(config, kind, _MODULES[kind](config), is_recomputed)
    config = replace(config, fp8=Fp8Recipe.NONE, keeps_fp8_params=False, wide_layers=(0, 0))
    made = _made(config, kind, _MODULES[kind](config), is_recomputed)
    phases = ("forward", "backward", "recompute")
    return replace(made, **{phase: _widened(getattr(made, phase)) for phase in phases})


def _widened(operators: Iterable[OperatorCount]) -> tuple[OperatorCount, ...]:
    return tuple(
        (replace(one, is_wide=True) if one.kind.is_quantized else one, count)
        for one, count in operators
    )


def attention_part(config: RunConfig) -> Block:
    """Work of a layer of experts before them: attention, norms and residual sums.

    This part and ``experts_part`` make up a layer, but for its parameters, and for transfers beside
    another micro-batch, whose window is the whole layer.
    """
    beside = {one.module for one in expert_modules(config)}
    layer = layer_modules(config, has_experts=True)
    return _work(config, [one for one in layer if one.module not in beside])


def experts_part(config: RunConfig) -> Block:
    """Work of the experts of a layer; it depends on context parallelism and the micro-batch by the
    tokens of a rank alone."""
    return _work(config, expert_modules(config))


def _work(config: RunConfig, parts: Iterable[LayerModule]) -> Block:
    bare = [
        replace(
            part,
            tensors=(),
            uses=tuple(use for use in part.uses if use.other_pass is OtherPass.NONE),
        )
        for part in parts
    ]
    return _made(config, BlockKind.EXPERT_LAYER, tuple(bare), False)


def _made(
    config: RunConfig, kind: BlockKind, parts: tuple[LayerModule, ...], is_recomputed: bool
) -> Block:
    nbytes = config.precision.nbytes
    whole = [shaped for part in parts for shaped in part.operators]
    uses = [use for part in parts for use in part.uses]
    again, again_uses = _recomputed(config, parts, is_whole=is_recomputed)
    if is_recomputed and config.distributes_saved_activations and config.parallelism.tp > 1:
        again_uses.append(transfer(hidden_call(config, Collective.ALL_GATHER), Placement.FORWARD))
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    return Block(
        kind=kind,
        forward=(*_counted(whole, Phase.FORWARD, nbytes), *_units(config, kind, Phase.FORWARD)),
        backward=(*_counted(whole, Phase.BACKWARD, nbytes), *_units(config, kind, Phase.BACKWARD)),
        recompute=_counted(again, Phase.RECOMPUTE, nbytes),
        num_checkpoints=_num_checkpoints(config, parts, is_whole=is_recomputed),
        uses=_joined(
            [
                *uses,
                *(replace(use, placement=Placement.RECOMPUTE) for use in again_uses),
                # What is gathered for a backward pass serves what is recomputed in it as well.
                *shard_uses(config, tensors, is_root=kind in _ROOT),
            ]
        ),
        tensors=tensors,
        numel=block_numel(tensors),
        strips=_strips(tensors, has_fp8_params=config.keeps_fp8_params),
    )


def _units(config: RunConfig, kind: BlockKind, phase: Phase) -> tuple[OperatorCount, ...]:
    """The host's part in a unit of FSDP2, layers and the model around them, which embedding and
    head belong to."""
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
    return {key: strip(found) for key, found in by_buffer.items()}


BlockVariant = tuple[BlockKind, bool, bool]
"""Kind of a block, whether the whole of it runs again in the backward pass, and whether its
products stay in 16 bits in an fp8 model."""


def chunk_blocks(config: RunConfig, chunk: int) -> tuple[BlockCount, ...]:
    """Blocks of a chunk in model order; equal neighbours are one entry."""
    again = config.recompute, config.recompute_num_layers
    return _chunk(_Asked(config), chunk, config.chunk_layers, again, config.wide_layers)


# Replicas, buckets and optimizer ask for the chunks of one layout again and again.
@lru_cache(maxsize=8192)
def _chunk(
    asked: _Asked,
    chunk: int,
    _chunk_layers: tuple[int, ...],
    _again: tuple[Recompute, int],
    _wide_layers: tuple[int, int],
) -> tuple[BlockCount, ...]:
    return tuple(
        (_cached(asked, *variant), count) for variant, count in chunk_variants(asked.config, chunk)
    )


def chunk_variants(config: RunConfig, chunk: int) -> tuple[tuple[BlockVariant, int], ...]:
    """What ``chunk_blocks`` consists of, without making the blocks."""
    found: list[tuple[BlockVariant, int]] = []
    has_predictions = chunk == config.parallelism.num_chunks - 1 and bool(
        config.model.num_prediction_layers
    )
    if chunk == 0:
        found.append(((BlockKind.EMBEDDING, False, False), 1))
    elif has_predictions:
        found.append(((BlockKind.EMBEDDING_COPY, False, False), 1))
    num_again = recomputed_layers(config, chunk)
    found += _layer_variants(config, chunk, num_again)
    if has_predictions:
        # Where only some layers are recomputed (``block``), Megatron recomputes none of these.
        is_whole = config.recompute is Recompute.FULL and not config.recompute_num_layers
        found.append(((BlockKind.PREDICTION, is_whole, False), 1))
    if chunk == config.parallelism.num_chunks - 1:
        found.append(((BlockKind.HEAD, False, False), 1))
    return tuple(found)


def _layer_variants(
    config: RunConfig, chunk: int, num_again: int
) -> list[tuple[BlockVariant, int]]:
    model = config.model
    if not any(config.wide_layers) and (model.experts is None or not model.experts.layer_pattern):
        kind = BlockKind.LAYER if model.experts is None else BlockKind.EXPERT_LAYER
        counts = ((True, num_again), (False, config.chunk_layers[chunk] - num_again))
        return [((kind, is_again, False), count) for is_again, count in counts if count]
    found: list[tuple[BlockVariant, int]] = []
    for place, layer in enumerate(config.layers_of(chunk)):
        kind = BlockKind.EXPERT_LAYER if model.has_experts(layer) else BlockKind.LAYER
        variant = (kind, place < num_again, config.is_wide(layer))
        if found and found[-1][0] == variant:
            found[-1] = (variant, found[-1][1] + 1)
        else:
            found.append((variant, 1))
    return found


def recomputed_layers(config: RunConfig, chunk: int = 0) -> int:
    """Layers of a chunk whose forward runs again under ``FULL`` (0 otherwise)."""
    if config.recompute is not Recompute.FULL:
        return 0
    held = config.chunk_layers[chunk]
    return min(config.recompute_num_layers or held, held)


def layer_modules(config: RunConfig, *, has_experts: bool = False) -> tuple[LayerModule, ...]:
    """A layer, in the order in which ``named_parameters()`` gives its tensors.

    Transformer Engine's products have no norm inside where the input goes to several: latents, and
    the router beside the experts (``gpt_layer_specs`` of ``megatron.core`` 0.16.1).
    """
    model = config.model
    if model.latent_attention is not None:
        attention = (norm_module(config, "input_norm"), *latent_attention_modules(config))
    else:
        attention = with_norm(config, "input_norm", attention_module(config))
    if has_experts:
        feed_forward = (norm_module(config, "mlp_norm"), *expert_modules(config))
    else:
        mlp = mlp_module(config, "mlp", model.ffn_hidden_size, has_bias=model.has_bias)
        feed_forward = with_norm(config, "mlp_norm", mlp)
    return (
        *attention,
        *feed_forward,
        *added_modules(config),
        residual_module(config),
    )


def _prediction(config: RunConfig) -> tuple[LayerModule, ...]:
    last = config.model.has_experts(config.model.num_layers - 1)
    return prediction_modules(config, layer_modules(config, has_experts=last))


_MODULES: dict[BlockKind, Callable[[RunConfig], tuple[LayerModule, ...]]] = {
    BlockKind.EMBEDDING: lambda config: (embedding_module(config),),
    BlockKind.LAYER: layer_modules,
    BlockKind.EXPERT_LAYER: lambda config: layer_modules(config, has_experts=True),
    BlockKind.EMBEDDING_COPY: lambda config: (embedding_copy_module(config),),
    BlockKind.PREDICTION: _prediction,
    BlockKind.HEAD: lambda config: head_module(config)[bool(config.model.num_prediction_layers) :],
}


_KINDS_OF_MODULE = {"core_attn": OperatorKind.CORE_ATTENTION}
"""Modules that are one operator of a layer module."""
_KEPT = frozenset({EMBEDDING, HEAD})
_ROOT = frozenset({BlockKind.EMBEDDING, BlockKind.EMBEDDING_COPY, BlockKind.HEAD})
"""Blocks that FSDP wraps with the model itself."""


def _recomputed(
    config: RunConfig, parts: tuple[LayerModule, ...], *, is_whole: bool
) -> tuple[list[Shaped], list[CollectiveUse]]:
    """Operators and forward collectives that run a second time."""
    modules = Again.own(config).parts
    kinds = {_KINDS_OF_MODULE[name] for name in modules if name in _KINDS_OF_MODULE}
    operators: list[Shaped] = []
    uses: list[CollectiveUse] = []
    for one in parts:
        forward = [use for use in one.uses if use.placement is Placement.FORWARD]
        if (is_whole and one.module not in _KEPT) or one.module in modules:
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
    names = Again.own(config).names
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


def _joined(uses: Iterable[CollectiveUse]) -> tuple[CollectiveUse, ...]:
    counts: Counter[CollectiveUse] = Counter()
    for use in uses:
        counts[use if use.count == 1 else replace(use, count=1)] += use.count
    return tuple(
        use if count == 1 else replace(use, count=count) for use, count in counts.items() if count
    )
