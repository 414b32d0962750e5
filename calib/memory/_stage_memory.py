"""Peak memory of a stage in layouts with the same pipeline, from the bytes of its modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np
from numpy.typing import NDArray

from ..layers.blocks import BlockKind, layer_kind
from ..layers.recompute import RecomputeOption
from ..workload.config import RunConfig
from ..workload.layout_table import Ints
from ._layer_memory import LayerBytes, columns
from ._module_memory import ModuleBytes, Modules
from ._states import UNITS_IN_FLIGHT, Number, StateBytes, UnitBytes

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
    """Layers of one chunk by kind, and how many of them each of some options recomputes."""

    num_layers: Mapping[BlockKind, int]
    recomputed: Mapping[BlockKind, Ints]
    """Layers that are recomputed as a whole."""
    inputs: Ints
    """Inputs retained for these."""
    span: Ints
    """Those that are recomputed together, from one retained input."""

    def plain(self, kind: BlockKind) -> Ints:
        """Return the other layers of a kind."""
        return self.num_layers[kind] - self.recomputed[kind]


def chunk_layers(
    config: RunConfig, chunk: int, kinds: Sequence[BlockKind], options: Sequence[RecomputeOption]
) -> ChunkLayers:
    """Return the layers of a chunk of a layout under each recompute option."""
    layers = config.layers_of(chunk)
    covered = np.array([option.num_covered(len(layers)) for option in options])
    together = min(config.recompute_span, max(len(layers), 1))
    span = np.where([option.num_layers > 0 for option in options], 1, together)
    own = [layer_kind(config.model, layer) for layer in layers]
    before = {kind: np.cumsum([0, *(one is kind for one in own)]) for kind in kinds}
    return ChunkLayers(
        num_layers={kind: int(number[-1]) for kind, number in before.items()},
        recomputed={kind: number[covered] for kind, number in before.items()},
        inputs=-(-covered // span),
        span=span,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageBytes:
    """Parts of a stage's peak, each a float or an array of shape (layouts,)."""

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageWeights:
    """Parameters of a stage, and bytes that follow from them alone."""

    rest: Number
    """Parameters outside the experts."""
    split: Number
    """Parameters of the experts."""
    copies: Number
    """8-bit copies of weights, less the weights that they replace."""
    scratch: Number
    """Scratch bytes that stay allocated for the whole run."""
    at_work: Number = 0.0
    """Unsharded weights and gradients that FSDP holds temporarily in the backward pass."""
    at_loss: Number = 0.0
    """Those at the loss, before there are gradients."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pipeline:
    """Layouts of one run whose stages have equal layers and passes in flight, and whose states are
    sharded in the same way."""

    config: RunConfig
    """One of them."""
    options: Sequence[RecomputeOption]
    option: Ints
    """Recompute option of each layout, by index."""
    run: Modules
    """Modules of all layouts of the run."""
    place: Ints
    """Weights of each layout, by index."""
    modules: ModuleBytes
    layers: Mapping[BlockKind, LayerBytes]
    """Activations of each kind of layer that the model has."""
    states: tuple[StateBytes, StateBytes]
    """States of parameters outside the experts, and of the experts."""

    def stage_bytes(self, stage: int) -> StageBytes:
        """Return the peak of one rank of a stage.

        It is the largest of three moments: the backward pass of a layer, the loss on the last
        stage, and the end of a micro-batch on the first, when the gradient of the embedding is
        materialised.
        """
        chunks = [
            chunk_layers(self.config, chunk, tuple(self.layers), self.options)
            for chunk in self.config.chunks_of(stage)
        ]
        weights = StageWeights(**columns(self._weights(chunks, stage), self.place))
        layers, logits, units = self._fullest_moment(chunks, stage, weights)
        scratch = weights.scratch + units
        if stage == self.config.parallelism.pp - 1:
            scratch = scratch + self.modules.head_scratch
        weights_nbytes, grads, optimizer, update = (
            weights.rest * getattr(self.states[0], name)
            + weights.split * getattr(self.states[1], name)
            for name in ("weights", "grads", "optimizer", "update")
        )
        # Activations and gathered weights are freed before the update, which may use their memory.
        more = np.maximum(update - layers - logits - units, 0.0)
        return StageBytes(
            weights=weights_nbytes + weights.copies,
            grads=grads,
            optimizer=optimizer + more,
            activations=layers,
            logits=logits,
            scratch=scratch,
        )

    def _weights(self, chunks: Sequence[ChunkLayers], stage: int) -> StageWeights:
        """Return the weights of a stage for each combination of degrees."""
        config = self.config
        is_first, is_last = stage == 0, stage == config.parallelism.pp - 1
        layers = {kind: sum(one.num_layers[kind] for one in chunks) for kind in self.layers}
        # Multi-token prediction embeds its tokens on the last stage.
        has_prediction = is_last and config.model.num_prediction_layers > 0
        ends = {
            BlockKind.EMBEDDING: int(is_first or has_prediction),
            BlockKind.PREDICTION: int(is_last),
            BlockKind.HEAD: int(is_last and not (is_first and config.model.is_tied)),
        }
        around, numel = self._total(ends, "numel"), self._total(layers, "numel")
        split = self._total({**layers, **ends}, "expert_numel")
        scratch = self._total({kind: min(number, 1) for kind, number in layers.items()}, "scratch")
        scratch = scratch + self.run.stage_scratch
        if not config.parallelism.shards_weights:
            copies = self._total(layers, "copies")
            return StageWeights(rest=numel + around, split=split, copies=copies, scratch=scratch)
        # Only gathered layers have copies, which are freed with them.
        weights = self.run.weights
        here = (weights[kind] for kind, number in layers.items() if number)
        return StageWeights(
            rest=numel + around,
            split=split,
            copies=UNITS_IN_FLIGHT * largest(weights[kind].copies for kind in layers),
            scratch=scratch,
            **_units(
                UnitBytes.of(config),
                largest(one.numel + one.expert_numel for one in here),
                around,
                numel + split,
            ),
        )

    def _total(self, counts: Mapping[BlockKind, int], name: str) -> Number:
        weights = self.run.weights
        return sum((count * getattr(weights[kind], name) for kind, count in counts.items()), 0.0)

    def _fullest_moment(
        self, chunks: Sequence[ChunkLayers], stage: int, weights: StageWeights
    ) -> tuple[Number, Number, Number]:
        """Return activations, the bytes that the loss adds, and units, at the fullest moment."""
        modules, par = self.modules, self.config.parallelism
        chunk_nbytes = [self._saved(chunk) for chunk in chunks]
        first = chunk_nbytes[0]
        if stage == 0:
            chunk_nbytes[0] = chunk_nbytes[0] + modules.embedding_saved
        if stage == par.pp - 1:
            chunk_nbytes[-1] = chunk_nbytes[-1] + modules.head_saved
        in_flight_counts = in_flight(
            num_stages=par.pp,
            num_virtual_stages=par.vp,
            num_microbatches=self.config.num_microbatches,
            group_size=par.microbatch_group_size or par.pp,
            stage=stage,
        )
        alive = _peak_nbytes(in_flight_counts.peaks, chunk_nbytes)
        layers = alive + self._working(chunks)
        if stage == 0:
            layers = np.maximum(layers, alive - first + modules.embedding_grad)
        if stage < par.pp - 1:
            return layers, 0.0, weights.at_work
        at_loss = _peak_nbytes(in_flight_counts.after_last_chunk, chunk_nbytes)
        is_loss = at_loss + modules.loss + weights.at_loss > layers + weights.at_work
        return (
            np.where(is_loss, at_loss, layers),
            np.where(is_loss, modules.loss, 0.0),
            np.where(is_loss, weights.at_loss, weights.at_work),
        )

    def _saved(self, chunk: ChunkLayers) -> Number:
        """Return the bytes that a chunk saves of one micro-batch."""
        nbytes = self._each(chunk.inputs) * self.modules.layer_input
        for kind, one in self.layers.items():
            if chunk.num_layers[kind]:
                nbytes = nbytes + self._each(chunk.plain(kind)) * one.saved
        return nbytes

    def _working(self, chunks: Sequence[ChunkLayers]) -> Number:
        """Return the bytes at the peak of the fullest layer's backward pass.

        ``CheckpointFunction`` of Megatron runs all layers of its span again before it goes back
        through the last of them, so that the activations of each are present.
        """
        most: Number = 0.0
        span = self._each(np.max([chunk.span for chunk in chunks], axis=0))
        for kind, one in self.layers.items():
            has_plain = np.any([chunk.plain(kind) for chunk in chunks], axis=0)
            if has_plain.any():
                most = np.maximum(most, self._each(has_plain) * one.working)
            is_again = np.any([chunk.recomputed[kind] for chunk in chunks], axis=0)
            if is_again.any():
                needed = one.recompute_working + (span - 1) * one.saved
                most = np.maximum(most, self._each(is_again) * needed)
        return most

    def _each(self, numbers: NDArray[np.int64 | np.bool_]) -> Number:
        """Return a number of each layout, from one for each recompute option."""
        if (numbers == numbers[0]).all():
            return float(numbers[0])
        return numbers.astype(float)[self.option]


def largest(many: Iterable[Number]) -> Number:
    """Return the largest of several numbers, at least 0, of each layout."""
    return reduce(np.maximum, many, 0.0)


def _units(
    each: UnitBytes, widest: Number, ends: Number, layers_numel: Number
) -> dict[str, Number]:
    """Return the bytes of FSDP units: the layers in flight, and embedding with head, which belong
    to the root unit and stay for the whole pass; plus the buffer of each gather."""
    ready = UNITS_IN_FLIGHT * each.gathered
    copies, retained_nbytes = (widest + ends) * each.copied, layers_numel * each.retained
    grads = widest * (each.unit - ready)
    at_work = np.maximum(widest * ready, retained_nbytes) + grads + ends * (each.unit / 2)
    at_loss = np.maximum(widest * each.gathered, retained_nbytes) + ends * each.gathered
    return {"at_work": at_work + copies, "at_loss": at_loss + copies}


def _peak_nbytes(rows: tuple[Counts, ...], chunk_nbytes: Sequence[Number]) -> Number:
    return largest(
        sum(count * nbytes for count, nbytes in zip(row, chunk_nbytes, strict=True)) for row in rows
    )
