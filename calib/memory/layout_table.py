"""Peak memory of many layouts of one model at once, for a planner."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..layers import BlockKind, RecomputeOption, num_shards
from ..workload import Recompute, RunConfig
from .module_memory import ModuleBytes, SplitModules
from .peak import overhead_nbytes, stage_chunks, stage_parts
from .stage_memory import ChunkLayers
from .states import Number, optimizer_nbytes, sharding_key, state_bytes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_FIRST_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """Rows of the module table, one per recompute option."""

    recompute_options: Sequence[RecomputeOption]
    rows: Ints
    whole: Ints
    """Layers per chunk that each option recomputes as a whole: -1 none, 0 all."""


class LayoutMemory:
    """Peak memory of layouts of one run; results shared by several layouts are cached between
    calls."""

    def __init__(self) -> None:
        self._splits: dict[Hashable, SplitModules] = {}
        self._places: dict[Hashable, int] = {}
        self._names: tuple[str, ...] = ()
        self._table = np.empty((_FIRST_ROWS, 0))
        self._lists: dict[Hashable, _Rows] = {}
        self._unlike: dict[Hashable, list[int]] = {}
        self._layers: dict[Hashable, list[ChunkLayers]] = {}

    def needed_nbytes(self, layouts: Sequence[RunConfig]) -> tuple[Floats, Floats]:
        """Return the bytes that the fullest stage of each layout allocates, and those outside the
        allocator, shape (layouts,) each.

        Every entry equals the result of ``memory`` to the byte; layouts with equal pipelines are
        evaluated together.
        """
        return self.recomputed_nbytes(
            [(one, (RecomputeOption.from_config(one),)) for one in layouts]
        )

    def recomputed_nbytes(
        self, layout_options: Sequence[tuple[RunConfig, tuple[RecomputeOption, ...]]]
    ) -> tuple[Floats, Floats]:
        """Return allocated and overhead bytes of each layout under each of its recompute options,
        in that order, shape (sum of options,) each.

        Pass equal tuples of options as one object, since they are cached by identity.
        """
        return self._needed(
            [(layout, self._rows(layout, agains)) for layout, agains in layout_options]
        )

    def least_nbytes(
        self, layouts: Sequence[RunConfig], modules: frozenset[str]
    ) -> tuple[Floats, Floats]:
        """Return lower bounds of allocated and overhead bytes of each layout, over recompute of any
        subset of ``modules`` and of whole layers, at least one per chunk; shape (layouts,) each.
        """
        layout_rows = [(layout, self._least_rows(layout, modules)) for layout in layouts]
        allocated, overhead = self._needed(layout_rows)
        return allocated.reshape(-1, 2).min(axis=1), overhead[::2]

    def _needed(self, layout_rows: Sequence[tuple[RunConfig, _Rows]]) -> tuple[Floats, Floats]:
        ends = np.cumsum([len(rows.rows) for _, rows in layout_rows])
        alike: dict[Hashable, list[int]] = {}
        for place, (layout, _) in enumerate(layout_rows):
            alike.setdefault(_pipeline_key(layout), []).append(place)
        allocated = np.empty(ends[-1] if len(layout_rows) else 0)
        overhead = np.empty_like(allocated)
        for places in alike.values():
            peak_nbytes = self._fullest_stage_nbytes([layout_rows[place] for place in places])
            begin = 0
            for place in places:
                layout, rows = layout_rows[place]
                end = begin + len(rows.rows)
                part = slice(ends[place] - len(rows.rows), ends[place])
                allocated[part] = peak_nbytes[begin:end]
                overhead[part] = overhead_nbytes(layout.parallelism, layout.device)
                begin = end
        return allocated, overhead

    def _rows(self, layout: RunConfig, recompute_options: tuple[RecomputeOption, ...]) -> _Rows:
        split = _split_key(layout)
        # ``_Rows`` references the tuple, so that its id is not reused.
        key = (
            (split, recompute_options[0])
            if len(recompute_options) == 1
            else (split, id(recompute_options))
        )
        cached_rows = self._lists.get(key)
        if cached_rows is None:
            cached_rows = self._lists[key] = _Rows(
                recompute_options=recompute_options,
                rows=np.array([self._row(layout, split, option) for option in recompute_options]),
                whole=np.array([_num_whole(option) for option in recompute_options]),
            )
        return cached_rows

    def _least_rows(self, layout: RunConfig, modules: frozenset[str]) -> _Rows:
        split = _split_key(layout)
        key = (split, modules)
        if key not in self._lists:
            plain, whole = (
                self._split(RecomputeOption(recompute=recompute).applied_to(layout), split)
                for recompute in (Recompute.NONE, Recompute.FULL)
            )
            least = _least([plain.plain, plain.recomputed(modules)])
            experts = layout.model.experts
            if layout.offload_modules or (experts is not None and experts.stash_factor):
                # Recomputed tensors are not copied, so that these shrink as others grow.
                least = _with_layers(least, working=0.0)
            working = [float(one.recompute_working) for one in whole.plain.layers.values()]
            least_whole = _with_layers(whole.plain, recompute_working=min(working))
            self._lists[key] = _Rows(
                recompute_options=(),
                rows=np.array([self._added((key, -1), least), self._added((key, 0), least_whole)]),
                whole=np.array([-1, 0]),
            )
        return self._lists[key]

    def _row(self, layout: RunConfig, split: Hashable, option: RecomputeOption) -> int:
        key = (split, option.recompute, option.modules)
        place = self._places.get(key)
        if place is None:
            modules = self._split(option.applied_to(layout), split).recomputed(option.parts)
            place = self._added(key, modules)
        return place

    def _added(self, key: Hashable, modules: ModuleBytes) -> int:
        place = self._places[key] = len(self._places)
        if place == len(self._table):
            self._table = np.concatenate([self._table, np.empty_like(self._table)])
        columns = modules.to_columns()
        if not self._names:
            self._names = tuple(columns)
            self._table = np.empty((len(self._table), len(columns)))
        self._table[place] = [columns[name] for name in self._names]
        return place

    def _split(self, sample: RunConfig, split: Hashable) -> SplitModules:
        key = (split, sample.recompute is Recompute.FULL)
        if key not in self._splits:
            self._splits[key] = SplitModules.of(sample)
        return self._splits[key]

    def _fullest_stage_nbytes(self, layout_rows: Sequence[tuple[RunConfig, _Rows]]) -> Floats:
        """Return the allocated bytes of the fullest stage, for layouts with the same pipeline."""
        row_sets = [rows for _, rows in layout_rows]
        rows = self._table[np.concatenate([one.rows for one in row_sets])]
        whole = np.concatenate([one.whole for one in row_sets])
        modules = ModuleBytes.from_columns(dict(zip(self._names, rows.T, strict=True)))
        layouts, first = [layout for layout, _ in layout_rows], layout_rows[0][0]
        numbers = [len(one.rows) for one in row_sets]
        par = [one.parallelism for one in layouts]
        state = state_bytes(
            first,
            shards=np.repeat([num_shards(one) for one in par], numbers),
            expert_shards=np.repeat([num_shards(one, is_expert=True) for one in par], numbers),
            optimizer=np.repeat([optimizer_nbytes(one) for one in layouts], numbers),
        )
        distinct, index = np.unique(whole, return_inverse=True)
        out = np.zeros(len(rows))
        for stage in self._stages(first):
            chunks = self._chunks_of(first, distinct.tolist(), index, stage)
            parts = stage_parts(first, modules, state, stage, chunks)
            np.maximum(out, parts.total, out=out)
        return out

    def _stages(self, layout: RunConfig) -> list[int]:
        """Return the first and the last stage, and of the middle ones the first with each set of
        layer counts.

        The others need no more, since a stage has no more passes in flight than the one before it.
        """
        key = _shape_key(layout)
        if key not in self._unlike:
            self._unlike[key] = _distinct_stages(layout)
        return self._unlike[key]

    def _chunks_of(
        self, layout: RunConfig, whole: Sequence[int], index: Ints, stage: int
    ) -> list[ChunkLayers]:
        """Return the layers of a stage's chunks; entry i recomputes ``whole[index[i]]`` layers."""
        chunk_lists = [self._chunks(layout, number, stage) for number in whole]
        if len(chunk_lists) == 1:
            return chunk_lists[0]
        return [
            ChunkLayers(
                plain=_counts([one.plain for one in alike], index),
                recomputed=_counts([one.recomputed for one in alike], index),
                span=np.array([one.span for one in alike])[index],
            )
            for alike in zip(*chunk_lists, strict=True)
        ]

    def _chunks(self, layout: RunConfig, number: int, stage: int) -> list[ChunkLayers]:
        key = (_shape_key(layout), number, stage)
        if key not in self._layers:
            recompute = Recompute.NONE if number < 0 else Recompute.FULL
            option = RecomputeOption(recompute=recompute, num_layers=max(number, 0))
            self._layers[key] = stage_chunks(option.applied_to(layout), stage)
        return self._layers[key]


def _counts(many: Sequence[Mapping[BlockKind, Number]], index: Ints) -> dict[BlockKind, Floats]:
    return {kind: np.array([float(one[kind]) for one in many])[index] for kind in many[0]}


def _least(many: Sequence[ModuleBytes]) -> ModuleBytes:
    """Return the minimum of each field."""
    columns = [one.to_columns() for one in many]
    return ModuleBytes.from_columns(
        {name: min(float(one[name]) for one in columns) for name in columns[0]}
    )


def _with_layers(modules: ModuleBytes, **changes: float) -> ModuleBytes:
    layers = {kind: replace(one, **changes) for kind, one in modules.layers.items()}
    return replace(modules, layers=layers)


def _num_whole(option: RecomputeOption) -> int:
    return option.num_layers if option.recompute is Recompute.FULL else -1


def _split_key(layout: RunConfig) -> Hashable:
    """Return the degrees that split a layer, and the number of passes with deferred gradients."""
    par = layout.parallelism
    degrees = (par.tp, par.cp, par.ep, par.expert_tp, par.is_sequence_parallel, par.pp > 1)
    return (*degrees, layout.batch.micro_batch_size, layout.num_deferred_heads)


def _shape_key(layout: RunConfig) -> tuple[Hashable, ...]:
    par = layout.parallelism
    return par.pp, par.vp, par.chunk_layers, layout.recompute_span


def _pipeline_key(layout: RunConfig) -> Hashable:
    """Return the settings that a stage's layers and passes in flight depend on."""
    par = layout.parallelism
    group = par.microbatch_group_size or par.pp
    # Beyond this number of micro-batches, passes in flight do not grow: see ``in_flight``.
    enough = (2 * par.pp // (group * par.vp) + 4) * group if par.vp > 1 else 2 * par.pp
    num = min(layout.num_microbatches, enough)
    return (*_shape_key(layout), num, group, *sharding_key(layout))


def _distinct_stages(layout: RunConfig) -> list[int]:
    model, last = layout.model, layout.parallelism.pp - 1
    stage_by_counts: dict[Hashable, int] = {}
    for stage in range(1, last):
        chunk_layers = [layout.layers_of(chunk) for chunk in layout.chunks_of(stage)]
        counts = tuple(
            model.layer_kinds[layers.start : layers.stop]
            or (len(layers), sum(map(model.has_experts, layers)))
            for layers in chunk_layers
        )
        stage_by_counts.setdefault(counts, stage)
    return sorted({0, last, *stage_by_counts.values()})
