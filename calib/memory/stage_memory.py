"""The peak of a stage, made of the bytes of its modules.

One source for one layout and for many: every quantity is a float, or an array with one entry for
each layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..workload import SCHEDULES, Schedule
from .module_memory import ModuleBytes
from .states import UNITS_IN_FLIGHT, Number, StateBytes

Counts = tuple[int, ...]
"""Micro-batches held of each chunk of a stage, in model order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """The largest sets of micro-batches that a stage holds: none contains another."""

    peaks: tuple[Counts, ...]
    after_last_chunk: tuple[Counts, ...]
    """The same among the moments right after a forward pass of the stage's last chunk."""

    @property
    def most(self) -> int:
        """Most forward passes held at once, over all chunks."""
        return max(sum(counts) for counts in self.peaks)


# A planner asks for the stages of the same pipelines again and again.
@lru_cache(maxsize=65536)
def in_flight(
    *,
    num_stages: int,
    num_virtual_stages: int,
    num_microbatches: int,
    group_size: int,
    schedule: Schedule,
    stage: int,
) -> InFlight:
    """What a stage holds under each schedule.

    Interleaved chunks are counted in Megatron's own order.

    >>> common = dict(num_microbatches=8, group_size=4, schedule=Schedule.ONE_F_ONE_B)
    >>> [in_flight(num_stages=4, num_virtual_stages=1, stage=s, **common).most for s in range(4)]
    [4, 3, 2, 1]
    >>> [in_flight(num_stages=4, num_virtual_stages=2, stage=s, **common).most for s in range(4)]
    [11, 9, 7, 5]
    """
    if num_virtual_stages > 1:
        return _interleaved(num_stages, num_virtual_stages, num_microbatches, group_size, stage)
    held = ((SCHEDULES[schedule].most_held(num_stages, stage, num_microbatches),),)
    return InFlight(peaks=held, after_last_chunk=held)


def _interleaved(
    num_stages: int, num_chunks: int, num_microbatches: int, group: int, stage: int
) -> InFlight:
    """Counts along ``forward_backward_pipelining_with_interleaving`` of ``megatron.core`` 0.16.1.

    Warm-up is 2 (p - stage - 1) + (v - 1) x group passes.  The order repeats with every group, so
    that the groups of warm-up and two more show every peak.
    """
    warmup = 2 * (num_stages - stage - 1) + (num_chunks - 1) * group
    num_groups = -(-warmup // (group * num_chunks)) + 2
    num_microbatches = min(num_microbatches, num_groups * group)
    order = _chunk_order(num_chunks, num_microbatches, group)
    held = [0] * num_chunks
    peaks: set[Counts] = set()
    after_last: set[Counts] = set()
    for index, chunk in enumerate(order):
        held[chunk] += 1
        if index + 1 >= min(warmup, len(order)):
            peaks.add(tuple(held))
        if chunk == num_chunks - 1:
            after_last.add(tuple(held))
        if index >= warmup:
            held[num_chunks - 1 - order[index - warmup]] -= 1
    return InFlight(peaks=_maximal(peaks), after_last_chunk=_maximal(after_last))


def _chunk_order(num_chunks: int, num_microbatches: int, group: int) -> list[int]:
    """Chunk of each forward pass: a group of micro-batches through every chunk, then the next."""
    return [
        chunk
        for begin in range(0, num_microbatches, group)
        for chunk in range(num_chunks)
        for _ in range(min(group, num_microbatches - begin))
    ]


def _maximal(found: set[Counts]) -> tuple[Counts, ...]:
    return tuple(
        sorted(
            one
            for one in found
            if not any(
                other != one and all(a <= b for a, b in zip(one, other, strict=True))
                for other in found
            )
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayers:
    """Layers of one chunk by kind; ``again``: recomputed as a whole."""

    dense: Number
    dense_again: Number
    expert: Number
    expert_again: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """The parts of a stage's peak, each a float or an array."""

    weights: Number
    grads: Number
    optimizer: Number
    activations: Number
    logits: Number
    scratch: Number

    @property
    def total(self) -> Number:
        """All parts together."""
        states = self.weights + self.grads + self.optimizer
        return states + self.activations + self.logits + self.scratch


def stage_bytes(
    modules: ModuleBytes,
    state: StateBytes,
    chunks: list[ChunkLayers],
    held: InFlight,
    *,
    is_first: bool,
    is_last: bool,
    is_tied: bool,
) -> StageBytes:
    """Peak of one rank of a stage with these chunks, in model order.

    The fullest of three moments: the backward pass of a layer, the loss on the last stage, and the
    end of a micro-batch on the first, where the gradient of the embedding is made.
    """
    dense = sum(chunk.dense + chunk.dense_again for chunk in chunks)
    expert = sum(chunk.expert + chunk.expert_again for chunk in chunks)
    layers_numel = dense * modules.layer_numel + expert * modules.expert_layer_numel
    ends = _ends(modules, is_first, is_last, is_tied)
    rest = layers_numel + ends
    split = expert * modules.expert_numel + (modules.prediction_expert_numel if is_last else 0.0)
    units = _units(modules, state, dense, expert, ends, layers_numel + split)
    layers, logits, units_now = _held(
        modules, chunks, held, units, is_first=is_first, is_last=is_last
    )
    passing = units_now + state.buckets
    # At the update nothing of the passes is there.
    update = np.minimum(rest * state.update + split * state.expert_update, state.most_update)
    more = np.maximum(update - layers - logits - passing, 0.0)
    return StageBytes(
        weights=rest * state.weights
        + split * state.expert_weights
        + _copies(modules, state, dense, expert),
        grads=rest * state.grads + split * state.expert_grads,
        optimizer=rest * state.optimizer + split * state.expert_optimizer + more,
        activations=layers,
        logits=logits,
        scratch=_scratch(modules, dense, expert, is_last) + passing,
    )


def _copies(modules: ModuleBytes, state: StateBytes, dense: Number, expert: Number) -> Number:
    """Returns the bytes of copies of weights in 8 bits, less what they replace."""
    if state.keeps_layers_whole:
        return dense * modules.dense_weights_extra + expert * modules.expert_weights_extra
    # They are made of the layers in flight, and go with them.
    most = np.maximum(modules.dense_weights_extra, modules.expert_weights_extra)
    return UNITS_IN_FLIGHT * np.maximum(most, 0.0)


def _scratch(modules: ModuleBytes, dense: Number, expert: Number, is_last: bool) -> Number:
    """Returns the scratch bytes that stay for the whole run."""
    here = modules.scratch + (modules.head_scratch if is_last else 0.0)
    here = here + np.where(dense > 0, modules.dense_scratch, 0.0)
    return here + np.where(expert > 0, modules.expert_scratch, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """Whole weights and gradients that FSDP holds for a while; 0 without it."""

    at_work: Number = 0.0
    """In the backward pass."""
    at_loss: Number = 0.0
    """Before it, while there is no gradient."""


def _units(
    modules: ModuleBytes,
    state: StateBytes,
    dense: Number,
    expert: Number,
    ends: Number,
    layers_numel: Number,
) -> _Units:
    """Those of the layers in flight, and of embedding and head, which are one unit with the model
    itself and stay for the whole pass; and what a gather of each writes before it is cut up."""
    if state.keeps_layers_whole:
        return _Units()
    widest = np.maximum(
        np.where(dense > 0, modules.layer_numel, 0.0),
        np.where(expert > 0, modules.expert_layer_numel + modules.expert_numel, 0.0),
    )
    ready = UNITS_IN_FLIGHT * state.gathered
    copies, kept = (widest + ends) * state.copied, layers_numel * state.kept
    grads = widest * (state.unit - ready)
    if state.live_numel:
        # Modules are gathered one by one, up to so many parameters, whatever they are of.
        live = np.minimum(layers_numel + ends, state.live_numel) * state.gathered
        return _Units(at_work=live + grads, at_loss=live)
    at_work = np.maximum(widest * ready, kept) + grads + ends * (state.unit / 2)
    at_loss = np.maximum(widest * state.gathered, kept) + ends * state.gathered
    return _Units(at_work=at_work + copies, at_loss=at_loss + copies)


def _held(
    modules: ModuleBytes,
    chunks: list[ChunkLayers],
    held: InFlight,
    units: _Units,
    *,
    is_first: bool,
    is_last: bool,
) -> tuple[Number, Number, Number]:
    """Activations, what the loss adds, and units, at the fullest moment."""
    kept = [
        chunk.dense * modules.dense_kept
        + chunk.expert * modules.expert_kept
        + (chunk.dense_again + chunk.expert_again) * modules.layer_input
        for chunk in chunks
    ]
    first = kept[0]
    if is_first:
        kept[0] = kept[0] + modules.embedding_kept
    if is_last:
        kept[-1] = kept[-1] + modules.head_kept
    alive = _most(held.peaks, kept)
    layers = alive + _working(modules, chunks)
    if is_first:
        layers = np.maximum(layers, alive - first + modules.embedding_grad)
    if not is_last:
        return layers, 0.0, units.at_work
    at_loss = _most(held.after_last_chunk, kept)
    is_loss = at_loss + modules.loss + units.at_loss > layers + units.at_work
    return (
        np.where(is_loss, at_loss, layers),
        np.where(is_loss, modules.loss, 0.0),
        np.where(is_loss, units.at_loss, units.at_work),
    )


def _ends(modules: ModuleBytes, is_first: bool, is_last: bool, is_tied: bool) -> Number:
    """Parameters of embedding, final norm, output product and multi-token prediction."""
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
    most: Number = 0.0
    for name, needed in (
        ("dense", modules.dense_working),
        ("dense_again", modules.dense_again),
        ("expert", modules.expert_working),
        ("expert_again", modules.expert_again),
    ):
        count = sum(getattr(chunk, name) for chunk in chunks)
        most = np.maximum(most, np.where(count > 0, needed, 0.0))
    return most


def _most(rows: tuple[tuple[int, ...], ...], kept: list[Number]) -> Number:
    most: Number = 0.0
    for row in rows:
        held = sum(count * nbytes for count, nbytes in zip(row, kept, strict=True))
        most = np.maximum(most, held)
    return most
