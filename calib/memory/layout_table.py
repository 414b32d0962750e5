"""Peak memory of many layouts of one model at once, for a planner."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from ..layers import Again, num_shards
from ..workload import Recompute, RunConfig
from .module_memory import ModuleBytes, SplitModules
from .peak import overhead_nbytes, stage_chunks, stage_parts
from .stage_memory import ChunkLayers
from .states import optimizer_nbytes, sharding_key, state_bytes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_FIRST_ROWS = 64
_MODULES = tuple(field.name for field in fields(ModuleBytes))
_LAYERS = tuple(field.name for field in fields(ChunkLayers))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """Rows of the table of modules for what may be computed again."""

    agains: Sequence[Again]
    rows: Ints
    whole: Ints
    """Layers that each chunk recomputes as a whole: -1 none, 0 all."""


def peaks_nbytes(layouts: Sequence[RunConfig]) -> Floats:
    """Bytes of the fullest stage of each layout, context and communicators included.

    Shape (layouts,).
    """
    allocated, overhead = needed_nbytes(layouts)
    return allocated + overhead


def needed_nbytes(layouts: Sequence[RunConfig]) -> tuple[Floats, Floats]:
    """What the fullest stage of each layout has allocated, and what lies beside the allocator,
    shape (layouts,) each; all of one run."""
    return LayoutMemory().needed_nbytes(layouts)


class LayoutMemory:
    """Peak memory of layouts of one run.  What several have in common is worked out once, also for
    those that are asked for later."""

    def __init__(self) -> None:
        self._splits: dict[Hashable, SplitModules] = {}
        self._places: dict[Hashable, int] = {}
        self._table = np.empty((_FIRST_ROWS, len(_MODULES)))
        self._lists: dict[Hashable, _Rows] = {}
        self._unlike: dict[Hashable, list[int]] = {}
        self._layers: dict[Hashable, list[ChunkLayers]] = {}

    def needed_nbytes(self, layouts: Sequence[RunConfig]) -> tuple[Floats, Floats]:
        """As the function of this name.

        The same arithmetic as ``memory``, which every entry equals to the byte; layouts with equal
        pipelines are done together.
        """
        return self.recomputed_nbytes([(one, (Again.own(one),)) for one in layouts])

    def recomputed_nbytes(
        self, asked: Sequence[tuple[RunConfig, tuple[Again, ...]]]
    ) -> tuple[Floats, Floats]:
        """The same of layouts that compute again, one after another, what stands beside each.

        Equal tuples of that had best be one object.
        """
        return self._needed([(layout, self._rows(layout, agains)) for layout, agains in asked])

    def least_nbytes(
        self, layouts: Sequence[RunConfig], modules: frozenset[str]
    ) -> tuple[Floats, Floats]:
        """What each layout needs at least, whichever of some modules it computes again, or whole
        layers, at least one in each chunk; shape (layouts,) each."""
        found = [(layout, self._least_rows(layout, modules)) for layout in layouts]
        allocated, overhead = self._needed(found)
        return allocated.reshape(-1, 2).min(axis=1), overhead[::2]

    def _needed(self, asked: Sequence[tuple[RunConfig, _Rows]]) -> tuple[Floats, Floats]:
        ends = np.cumsum([len(rows.rows) for _, rows in asked])
        alike: dict[Hashable, list[int]] = {}
        for place, (layout, _) in enumerate(asked):
            alike.setdefault(_pipeline_key(layout), []).append(place)
        allocated = np.empty(ends[-1] if len(asked) else 0)
        overhead = np.empty_like(allocated)
        for places in alike.values():
            found = self._fullest([asked[place] for place in places])
            begin = 0
            for place in places:
                layout, rows = asked[place]
                end = begin + len(rows.rows)
                part = slice(ends[place] - len(rows.rows), ends[place])
                allocated[part] = found[begin:end]
                overhead[part] = overhead_nbytes(layout.parallelism, layout.device)
                begin = end
        return allocated, overhead

    def _rows(self, layout: RunConfig, agains: tuple[Again, ...]) -> _Rows:
        split = _split_key(layout)
        # As long as the tuple is kept here no other one has its number.
        key = (split, agains[0]) if len(agains) == 1 else (split, id(agains))
        found = self._lists.get(key)
        if found is None:
            found = self._lists[key] = _Rows(
                agains=agains,
                rows=np.array([self._row(layout, split, again) for again in agains]),
                whole=np.array([_num_whole(again) for again in agains]),
            )
        return found

    def _least_rows(self, layout: RunConfig, modules: frozenset[str]) -> _Rows:
        split = _split_key(layout)
        key = (split, modules)
        if key not in self._lists:
            plain, whole = (
                self._split(Again(recompute=recompute).of(layout), split)
                for recompute in (Recompute.NONE, Recompute.FULL)
            )
            least = _least([plain.plain, plain.recomputed(modules)])
            experts = layout.model.experts
            if layout.offload_modules or (experts is not None and experts.stash_factor):
                # What runs again is not copied, so that these shrink as others grow.
                least = replace(least, dense_working=0.0, expert_working=0.0)
            again = min(float(whole.plain.dense_again), float(whole.plain.expert_again))
            least_whole = replace(whole.plain, dense_again=again, expert_again=again)
            self._lists[key] = _Rows(
                agains=(),
                rows=np.array([self._added((key, -1), least), self._added((key, 0), least_whole)]),
                whole=np.array([-1, 0]),
            )
        return self._lists[key]

    def _row(self, layout: RunConfig, split: Hashable, again: Again) -> int:
        key = (split, again.recompute, again.modules)
        place = self._places.get(key)
        if place is None:
            found = self._split(again.of(layout), split).recomputed(again.parts)
            place = self._added(key, found)
        return place

    def _added(self, key: Hashable, modules: ModuleBytes) -> int:
        place = self._places[key] = len(self._places)
        if place == len(self._table):
            self._table = np.concatenate([self._table, np.empty_like(self._table)])
        self._table[place] = [getattr(modules, name) for name in _MODULES]
        return place

    def _split(self, sample: RunConfig, split: Hashable) -> SplitModules:
        key = (split, sample.recompute is Recompute.FULL)
        if key not in self._splits:
            self._splits[key] = SplitModules.of(sample)
        return self._splits[key]

    def _fullest(self, asked: Sequence[tuple[RunConfig, _Rows]]) -> Floats:
        """Allocated bytes of the fullest stage, of layouts with the same pipeline."""
        found = [rows for _, rows in asked]
        rows = self._table[np.concatenate([one.rows for one in found])]
        whole = np.concatenate([one.whole for one in found])
        modules = ModuleBytes(**dict(zip(_MODULES, rows.T, strict=True)))
        layouts, first = [layout for layout, _ in asked], asked[0][0]
        numbers = [len(one.rows) for one in found]
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
        """The first and the last stage, and of those between the first that holds as many layers.

        A stage holds no more passes than the one before it.
        """
        key = _shape_key(layout)
        if key not in self._unlike:
            self._unlike[key] = _unlike(layout)
        return self._unlike[key]

    def _chunks_of(
        self, layout: RunConfig, whole: Sequence[int], index: Ints, stage: int
    ) -> list[ChunkLayers]:
        """Layers of the chunks of a stage, where each layout recomputes one of some numbers."""
        found = [self._chunks(layout, number, stage) for number in whole]
        if len(found) == 1:
            return found[0]
        return [
            ChunkLayers(
                **{
                    name: np.array([float(getattr(one, name)) for one in alike])[index]
                    for name in _LAYERS
                }
            )
            for alike in zip(*found, strict=True)
        ]

    def _chunks(self, layout: RunConfig, number: int, stage: int) -> list[ChunkLayers]:
        key = (_shape_key(layout), number, stage)
        if key not in self._layers:
            recompute = Recompute.NONE if number < 0 else Recompute.FULL
            again = Again(recompute=recompute, num_layers=max(number, 0))
            self._layers[key] = stage_chunks(again.of(layout), stage)
        return self._layers[key]


def _least(many: Sequence[ModuleBytes]) -> ModuleBytes:
    """Of each field the least."""
    return ModuleBytes(
        **{name: min(float(getattr(one, name)) for one in many) for name in _MODULES}
    )


def _num_whole(again: Again) -> int:
    return again.num_layers if again.recompute is Recompute.FULL else -1


def _split_key(layout: RunConfig) -> Hashable:
    """The degrees that split a layer, and the passes whose output gradients wait."""
    par = layout.parallelism
    degrees = (par.tp, par.cp, par.ep, par.expert_tp, par.is_sequence_parallel, par.pp > 1)
    return (*degrees, layout.batch.micro_batch_size, layout.num_deferred_heads)


def _shape_key(layout: RunConfig) -> Hashable:
    par = layout.parallelism
    return par.pp, par.vp, par.chunk_layers


def _pipeline_key(layout: RunConfig) -> Hashable:
    """What the layers of a stage and the passes that it holds depend on."""
    par = layout.parallelism
    group = par.microbatch_group_size or par.pp
    # With more micro-batches than this a schedule holds no more: see ``in_flight``.
    enough = (2 * par.pp // (group * par.vp) + 4) * group if par.vp > 1 else 2 * par.pp
    num = min(layout.num_microbatches, enough)
    return (par.pp, par.vp, num, group, par.chunk_layers, par.schedule, *sharding_key(layout))


def _unlike(layout: RunConfig) -> list[int]:
    model, last = layout.model, layout.parallelism.pp - 1
    found: dict[tuple[tuple[int, int], ...], int] = {}
    for stage in range(1, last):
        held = [layout.layers_of(chunk) for chunk in layout.chunks_of(stage)]
        counts = tuple((len(layers), sum(map(model.has_experts, layers))) for layers in held)
        found.setdefault(counts, stage)
    return sorted({0, last, *found.values()})
