"""Peak memory of a stage, from the bytes of its modules.

The same code serves one layout and many: every quantity is a float, or an array with one entry per
layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from ..layers import BlockKind
from .module_memory import ModuleBytes
from .states import UNITS_IN_FLIGHT, Number, StateBytes

_KindCounts: TypeAlias = "Mapping[BlockKind, Number]"
Counts = tuple[int, ...]
"""Micro-batches in flight of each chunk of a stage, in model order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Maximal sets of micro-batches in flight on a stage: none contains another."""

    peaks: tuple[Counts, ...]
    after_last_chunk: tuple[Counts, ...]
    """Maximal sets right after a forward pass of the stage's last chunk."""

    @property
    def most(self) -> int:
        """Most forward passes in flight at once, over all chunks."""
        return max(sum(counts) for counts in self.peaks)


# A planner requests the stages of the same pipelines repeatedly.
@lru_cache(maxsize=65536)
def in_flight(
    *,
    num_stages: int,
    num_virtual_stages: int,
    num_microbatches: int,
    group_size: int,
    stage: int,
) -> InFlight:
    """Return the micro-batches in flight on a stage.

    Interleaved chunks are counted in Megatron's order, others as in Narayanan et al., SC 2021,
    section 2.2.1.

    >>> common = dict(num_microbatches=8, group_size=4)
    >>> [in_flight(num_stages=4, num_virtual_stages=1, stage=s, **common).most for s in range(4)]
    [4, 3, 2, 1]
    >>> [in_flight(num_stages=4, num_virtual_stages=2, stage=s, **common).most for s in range(4)]
    [11, 9, 7, 5]
    """
    if num_virtual_stages > 1:
        return _interleaved(num_stages, num_virtual_stages, num_microbatches, group_size, stage)
    peak_counts = ((min(num_microbatches, num_stages - stage),),)
    return InFlight(peaks=peak_counts, after_last_chunk=peak_counts)


def _interleaved(
    num_stages: int, num_chunks: int, num_microbatches: int, group: int, stage: int
) -> InFlight:
    """Count along ``forward_backward_pipelining_with_interleaving`` of ``megatron.core`` 0.16.1.

    Warm-up is 2 (p - stage - 1) + (v - 1) x group passes.  The order repeats with every group, so
    that the warm-up groups and two more include every peak.
    """
    warmup = 2 * (num_stages - stage - 1) + (num_chunks - 1) * group
    num_groups = -(-warmup // (group * num_chunks)) + 2
    num_microbatches = min(num_microbatches, num_groups * group)
    order = _chunk_order(num_chunks, num_microbatches, group)
    live_counts = [0] * num_chunks
    peaks: set[Counts] = set()
    after_last: set[Counts] = set()
    for index, chunk in enumerate(order):
        live_counts[chunk] += 1
        if index + 1 >= min(warmup, len(order)):
            peaks.add(tuple(live_counts))
        if chunk == num_chunks - 1:
            after_last.add(tuple(live_counts))
        if index >= warmup:
            live_counts[num_chunks - 1 - order[index - warmup]] -= 1
    return InFlight(peaks=_maximal(peaks), after_last_chunk=_maximal(after_last))


def _chunk_order(num_chunks: int, num_microbatches: int, group: int) -> list[int]:
    """Return the chunk of each forward pass: each group of micro-batches runs through every chunk
    before the next group."""
    return [
        chunk
        for begin in range(0, num_microbatches, group)
        for chunk in range(num_chunks)
        for _ in range(min(group, num_microbatches - begin))
    ]


def _maximal(candidates: set[Counts]) -> tuple[Counts, ...]:
    return tuple(
        sorted(
            one
            for one in candidates
            if not any(
                other != one and all(a <= b for a, b in zip(one, other, strict=True))
                for other in candidates
            )
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayers:
    """Layers of one chunk by kind."""

    plain: Mapping[BlockKind, Number]
    recomputed: Mapping[BlockKind, Number]
    """Layers that are recomputed as a whole."""
    span: Number = 1
    """Those that are recomputed together, from one retained input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Parts of a stage's peak, each a float or an array."""

    weights: Number
    grads: Number
    optimizer: Number
    activations: Number
    logits: Number
    scratch: Number

    @property
    def total(self) -> Number:
        """Sum of all parts."""
        states = self.weights + self.grads + self.optimizer
        return states + self.activations + self.logits + self.scratch


def stage_bytes(
    modules: ModuleBytes,
    state: StateBytes,
    chunks: list[ChunkLayers],
    in_flight_counts: InFlight,
    *,
    is_first: bool,
    is_last: bool,
    is_tied: bool,
) -> StageBytes:
    """Return the peak of one rank of a stage; ``chunks`` are in model order.

    It is the largest of three moments: the backward pass of a layer, the loss on the last stage,
    and the end of a micro-batch on the first, when the gradient of the embedding is materialised.
    """
    counts = {
        kind: sum(chunk.plain[kind] + chunk.recomputed[kind] for chunk in chunks)
        for kind in modules.layers
    }
    layers_numel = _total(counts, {kind: one.numel for kind, one in modules.layers.items()})
    ends = _ends(modules, is_first, is_last, is_tied)
    rest = layers_numel + ends
    split = _total(counts, {kind: one.expert_numel for kind, one in modules.layers.items()})
    split = split + (modules.prediction_expert_numel if is_last else 0.0)
    units = _units(modules, state, counts, ends, layers_numel + split)
    layers, logits, units_now = _fullest_moment(
        modules, chunks, in_flight_counts, units, is_first=is_first, is_last=is_last
    )
    # Activations and gathered weights are freed before the update, which may use their memory.
    update = rest * state.update + split * state.expert_update
    more = np.maximum(update - layers - logits - units_now, 0.0)
    return StageBytes(
        weights=rest * state.weights
        + split * state.expert_weights
        + _copies(modules, state, counts),
        grads=rest * state.grads + split * state.expert_grads,
        optimizer=rest * state.optimizer + split * state.expert_optimizer + more,
        activations=layers,
        logits=logits,
        scratch=_scratch(modules, counts, is_last) + units_now,
    )


def _total(counts: _KindCounts, each: Mapping[BlockKind, Number]) -> Number:
    return sum((count * each[kind] for kind, count in counts.items()), 0.0)


def _copies(modules: ModuleBytes, state: StateBytes, counts: _KindCounts) -> Number:
    """Return the bytes of 8-bit copies of weights, less the weights that they replace."""
    extra = {kind: one.weights_extra for kind, one in modules.layers.items()}
    if state.keeps_layers_whole:
        return _total(counts, extra)
    # Under FSDP only gathered layers have copies, which are freed with them.
    most: Number = 0.0
    for nbytes in extra.values():
        most = np.maximum(most, nbytes)
    return UNITS_IN_FLIGHT * most


def _scratch(modules: ModuleBytes, counts: _KindCounts, is_last: bool) -> Number:
    """Return the scratch bytes that stay allocated for the whole run."""
    here = modules.scratch + (modules.head_scratch if is_last else 0.0)
    for kind, one in modules.layers.items():
        here = here + np.where(np.asarray(counts[kind]) > 0, one.scratch, 0.0)
    return here


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """Bytes of unsharded weights and gradients that FSDP holds temporarily; 0 without it."""

    at_work: Number = 0.0
    """Bytes in the backward pass."""
    at_loss: Number = 0.0
    """Bytes at the loss, before there are gradients."""


def _units(
    modules: ModuleBytes,
    state: StateBytes,
    counts: _KindCounts,
    ends: Number,
    layers_numel: Number,
) -> _Units:
    """Return the bytes of FSDP units: the layers in flight, and embedding with head, which belong
    to the root unit and stay for the whole pass; plus the buffer of each gather."""
    if state.keeps_layers_whole:
        return _Units()
    widest: Number = 0.0
    for kind, one in modules.layers.items():
        is_here = np.asarray(counts[kind]) > 0
        widest = np.maximum(widest, np.where(is_here, one.numel + one.expert_numel, 0.0))
    ready = UNITS_IN_FLIGHT * state.gathered
    copies, retained_nbytes = (widest + ends) * state.copied, layers_numel * state.retained
    grads = widest * (state.unit - ready)
    at_work = np.maximum(widest * ready, retained_nbytes) + grads + ends * (state.unit / 2)
    at_loss = np.maximum(widest * state.gathered, retained_nbytes) + ends * state.gathered
    return _Units(at_work=at_work + copies, at_loss=at_loss + copies)


def _fullest_moment(
    modules: ModuleBytes,
    chunks: list[ChunkLayers],
    in_flight_counts: InFlight,
    units: _Units,
    *,
    is_first: bool,
    is_last: bool,
) -> tuple[Number, Number, Number]:
    """Return activations, the bytes that the loss adds, and units, at the fullest moment."""
    chunk_nbytes = [
        _total(chunk.plain, {kind: one.saved for kind, one in modules.layers.items()})
        - (-sum(chunk.recomputed.values()) // chunk.span) * modules.layer_input
        for chunk in chunks
    ]
    first = chunk_nbytes[0]
    if is_first:
        chunk_nbytes[0] = chunk_nbytes[0] + modules.embedding_saved
    if is_last:
        chunk_nbytes[-1] = chunk_nbytes[-1] + modules.head_saved
    alive = _peak_nbytes(in_flight_counts.peaks, chunk_nbytes)
    layers = alive + _working(modules, chunks)
    if is_first:
        layers = np.maximum(layers, alive - first + modules.embedding_grad)
    if not is_last:
        return layers, 0.0, units.at_work
    at_loss = _peak_nbytes(in_flight_counts.after_last_chunk, chunk_nbytes)
    is_loss = at_loss + modules.loss + units.at_loss > layers + units.at_work
    return (
        np.where(is_loss, at_loss, layers),
        np.where(is_loss, modules.loss, 0.0),
        np.where(is_loss, units.at_loss, units.at_work),
    )


def _ends(modules: ModuleBytes, is_first: bool, is_last: bool, is_tied: bool) -> Number:
    """Return the parameters of embedding, final norm, output product and multi-token prediction."""
    numel = modules.embedding_numel if is_first else 0.0
    if not is_last:
        return numel
    numel = numel + modules.norm_numel + modules.prediction_numel
    if not (is_tied and is_first):
        numel = numel + modules.vocabulary_numel
    if not is_first:
        # Multi-token prediction embeds its tokens on the last stage.
        numel = numel + np.where(modules.prediction_numel > 0, modules.embedding_numel, 0.0)
    return numel


def _working(modules: ModuleBytes, chunks: list[ChunkLayers]) -> Number:
    """Return the bytes at the peak of the fullest layer's backward pass.

    ``CheckpointFunction`` of Megatron runs all layers of its span again before it goes back through
    the last of them, so that the activations of each are present.
    """
    most: Number = 0.0
    span: Number = 1
    for chunk in chunks:
        span = np.maximum(span, chunk.span)
    for kind, one in modules.layers.items():
        plain = sum(chunk.plain[kind] for chunk in chunks)
        recomputed = sum(chunk.recomputed[kind] for chunk in chunks)
        most = np.maximum(most, np.where(np.asarray(plain) > 0, one.working, 0.0))
        needed = one.recompute_working + (span - 1) * one.saved
        most = np.maximum(most, np.where(np.asarray(recomputed) > 0, needed, 0.0))
    return most


def _peak_nbytes(rows: tuple[tuple[int, ...], ...], chunk_nbytes: list[Number]) -> Number:
    most: Number = 0.0
    for row in rows:
        total_nbytes = sum(count * nbytes for count, nbytes in zip(row, chunk_nbytes, strict=True))
        most = np.maximum(most, total_nbytes)
    return most
