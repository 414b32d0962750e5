"""The pieces that a layout cuts a model into: work of one micro-batch on one rank.

A block depends on the model, the micro-batch and the degrees that split a layer, not on the number
of stages or replicas: layouts that differ in those share their blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from .collectives import CollectiveUse, Placement
from .config import Recompute, RunConfig
from .dense import attention_piece, embedding_piece, head_piece, mlp_piece, residual_piece
from .operators import Operator, OperatorCount, OperatorKind, Phase
from .pieces import Piece, Shaped, norm_piece
from .tensors import ParameterTensor


class BlockKind(Enum):
    """What a block is, in the order in which a model has them."""

    EMBEDDING = "embedding"
    LAYER = "layer"
    EXPERT_LAYER = "expert_layer"
    HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Work of one micro-batch in one block, and the parameters that it holds."""

    kind: BlockKind
    is_recomputed: bool
    forward: tuple[OperatorCount, ...]
    backward: tuple[OperatorCount, ...]
    recompute: tuple[OperatorCount, ...]
    """Forward operators that run again within the backward pass."""
    uses: tuple[CollectiveUse, ...]
    tensors: tuple[ParameterTensor, ...]

    @property
    def operators(self) -> tuple[OperatorCount, ...]:
        """Those of every phase."""
        return (*self.forward, *self.backward, *self.recompute)


BlockCount = tuple[Block, int]
"""A block and how many of it follow one another."""


def block(config: RunConfig, kind: BlockKind, *, is_recomputed: bool = False) -> Block:
    """One block of a layout.  ``is_recomputed``: the whole of it runs again (``FULL``)."""
    pieces = _PIECES[kind](config)
    nbytes = config.precision.nbytes
    whole = [shaped for piece in pieces for shaped in piece.operators]
    uses = [use for piece in pieces for use in piece.uses]
    again, again_uses = _recomputed(config, pieces, is_whole=is_recomputed)
    return Block(
        kind=kind,
        is_recomputed=is_recomputed,
        forward=_counted(whole, Phase.FORWARD, nbytes),
        backward=_counted(whole, Phase.BACKWARD, nbytes),
        recompute=_counted(again, Phase.RECOMPUTE, nbytes),
        uses=_joined([*uses, *(replace(use, placement=Placement.RECOMPUTE) for use in again_uses)]),
        tensors=tuple(tensor for piece in pieces for tensor in piece.tensors),
    )


BlockSort = tuple[BlockKind, bool]
"""Kind of a block, and whether the whole of it runs again in the backward pass."""


def chunk_blocks(config: RunConfig, chunk: int) -> tuple[BlockCount, ...]:
    """Blocks of a chunk in model order; equal neighbours are one entry."""
    return tuple(
        (block(config, kind, is_recomputed=is_recomputed), count)
        for (kind, is_recomputed), count in chunk_sorts(config, chunk)
    )


def chunk_sorts(config: RunConfig, chunk: int) -> tuple[tuple[BlockSort, int], ...]:
    """What ``chunk_blocks`` consists of, without making the blocks."""
    found: list[tuple[BlockSort, int]] = []
    if chunk == 0:
        found.append(((BlockKind.EMBEDDING, False), 1))
    covered = recomputed_layers(config, chunk)
    for place, layer in enumerate(config.layers_of(chunk)):
        kind = BlockKind.EXPERT_LAYER if config.model.has_experts(layer) else BlockKind.LAYER
        sort = (kind, place < covered)
        if found and found[-1][0] == sort:
            found[-1] = (sort, found[-1][1] + 1)
        else:
            found.append((sort, 1))
    if chunk == config.parallelism.num_chunks - 1:
        found.append(((BlockKind.HEAD, False), 1))
    return tuple(found)


def recomputed_layers(config: RunConfig, chunk: int = 0) -> int:
    """Layers of a chunk whose forward runs again under ``FULL`` (0 otherwise)."""
    if config.recompute is not Recompute.FULL:
        return 0
    held = config.chunk_layers[chunk]
    return min(config.recompute_num_layers or held, held)


def layer_pieces(config: RunConfig) -> tuple[Piece, ...]:
    """A dense layer, in the order in which ``named_parameters()`` gives its tensors."""
    return (
        norm_piece(config, "input_norm"),
        attention_piece(config),
        norm_piece(config, "mlp_norm"),
        mlp_piece(config),
        residual_piece(config),
    )


_PIECES: dict[BlockKind, Callable[[RunConfig], tuple[Piece, ...]]] = {
    BlockKind.EMBEDDING: lambda config: (embedding_piece(config),),
    BlockKind.LAYER: layer_pieces,
    BlockKind.HEAD: head_piece,
}


_KINDS_OF_MODULE = {"core_attn": OperatorKind.CORE_ATTENTION}
"""Modules that are one operator of a piece."""


def _recomputed(
    config: RunConfig, pieces: tuple[Piece, ...], *, is_whole: bool
) -> tuple[list[Shaped], list[CollectiveUse]]:
    """Operators and forward collectives that run a second time."""
    modules = set(config.recompute_modules or ("core_attn",))
    if config.recompute is not Recompute.SELECTIVE:
        modules = set()
    kinds = {_KINDS_OF_MODULE[name] for name in modules if name in _KINDS_OF_MODULE}
    operators: list[Shaped] = []
    uses: list[CollectiveUse] = []
    for piece in pieces:
        if is_whole or piece.module in modules:
            operators += piece.operators
            uses += [use for use in piece.uses if use.placement is Placement.FORWARD]
        else:
            operators += [shaped for shaped in piece.operators if shaped[0] in kinds]
    return operators, uses


def _counted(shaped: Iterable[Shaped], phase: Phase, nbytes: int) -> tuple[OperatorCount, ...]:
    counts: dict[tuple[OperatorKind, tuple[int, ...]], int] = {}
    for kind, shape, count in shaped:
        counts[kind, shape] = counts.get((kind, shape), 0) + count
    return tuple(
        (Operator(kind=kind, phase=phase, shape=shape, element_nbytes=nbytes), count)
        for (kind, shape), count in counts.items()
        if count
    )


def _joined(uses: Iterable[CollectiveUse]) -> tuple[CollectiveUse, ...]:
    counts: dict[CollectiveUse, int] = {}
    for use in uses:
        one = replace(use, count=1)
        counts[one] = counts.get(one, 0) + use.count
    return tuple(replace(use, count=count) for use, count in counts.items() if count)
