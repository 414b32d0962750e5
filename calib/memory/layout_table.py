"""Peak memory of many layouts of one model at once, for a planner."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields

import numpy as np
import numpy.typing as npt

from ..layers.buckets import num_shards
from ..workload.config import Recompute, RunConfig
from .block_memory import ChunkLayers, ModuleBytes, module_bytes
from .peak import overhead_nbytes, stage_chunks, stage_parts
from .states import optimizer_nbytes, sharding_key, state_bytes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_MODULES = tuple(field.name for field in fields(ModuleBytes))
_LAYERS = tuple(field.name for field in fields(ChunkLayers))


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
        self._modules: list[tuple[float, ...]] = []
        self._module_places: dict[Hashable, int] = {}
        self._unlike: dict[Hashable, list[int]] = {}
        self._layers: dict[Hashable, list[ChunkLayers]] = {}

    def needed_nbytes(self, layouts: Sequence[RunConfig]) -> tuple[Floats, Floats]:
        """As the function of this name.

        The same arithmetic as ``memory``, which every entry equals to the byte; layouts with equal
        pipelines are done together.
        """
        index = [self._module_place(layout) for layout in layouts]
        table = np.array(self._modules, dtype=float).reshape(-1, len(_MODULES))
        alike: dict[Hashable, list[int]] = {}
        for place, layout in enumerate(layouts):
            alike.setdefault(_pipeline_key(layout), []).append(place)
        allocated = np.empty(len(layouts))
        for places in alike.values():
            columns = table[[index[place] for place in places]].T
            modules = ModuleBytes(**dict(zip(_MODULES, columns, strict=True)))
            allocated[places] = self._fullest([layouts[place] for place in places], modules)
        overhead = [overhead_nbytes(c.parallelism, c.device) for c in layouts]
        return allocated, np.array(overhead, dtype=float)

    def _module_place(self, layout: RunConfig) -> int:
        place = self._module_places.setdefault(_split_key(layout), len(self._modules))
        if place == len(self._modules):
            modules = module_bytes(layout)
            self._modules.append(tuple(float(getattr(modules, name)) for name in _MODULES))
        return place

    def _fullest(self, layouts: list[RunConfig], modules: ModuleBytes) -> Floats:
        """Allocated bytes of the fullest stage, of layouts with the same pipeline."""
        state = state_bytes(
            layouts[0],
            shards=np.array([num_shards(one.parallelism) for one in layouts]),
            expert_shards=np.array(
                [num_shards(one.parallelism, is_expert=True) for one in layouts]
            ),
            optimizer=np.array([optimizer_nbytes(one) for one in layouts]),
        )
        samples: dict[Hashable, RunConfig] = {}
        places: dict[Hashable, int] = {}
        index = np.empty(len(layouts), dtype=np.int64)
        for place, layout in enumerate(layouts):
            key = _again_key(layout)
            index[place] = places.setdefault(key, len(places))
            samples.setdefault(key, layout)
        out = np.zeros(len(layouts))
        for stage in self._stages(layouts[0]):
            chunks = self._chunks_of(list(samples.values()), index, stage)
            found = stage_parts(layouts[0], modules, state, stage, chunks)
            np.maximum(out, found.total, out=out)
        return out

    def _stages(self, layout: RunConfig) -> list[int]:
        """The first and the last stage, and of those between the first that holds as many layers.

        A stage holds no more passes than the one before it.
        """
        key = _shape_key(layout)
        if key not in self._unlike:
            self._unlike[key] = _unlike(layout)
        return self._unlike[key]

    def _chunks_of(self, samples: list[RunConfig], index: Ints, stage: int) -> list[ChunkLayers]:
        """Layers of the chunks of a stage, where each layout has those of one of the samples."""
        found = [self._sample_chunks(sample, stage) for sample in samples]
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

    def _sample_chunks(self, sample: RunConfig, stage: int) -> list[ChunkLayers]:
        key = (_shape_key(sample), _again_key(sample), stage)
        if key not in self._layers:
            self._layers[key] = stage_chunks(sample, stage)
        return self._layers[key]


def _split_key(layout: RunConfig) -> Hashable:
    """What ``module_bytes`` depends on: the degrees that split a layer, and what is recomputed."""
    par = layout.parallelism
    degrees = (par.tp, par.cp, par.ep, par.expert_tp, par.is_sequence_parallel)
    again = layout.recompute, layout.recompute_modules
    return (*degrees, layout.batch.micro_batch_size, *again)


def _shape_key(layout: RunConfig) -> Hashable:
    par = layout.parallelism
    return par.pp, par.vp, par.chunk_layers


def _again_key(layout: RunConfig) -> int:
    """Layers that each chunk recomputes as a whole: -1 none, 0 all."""
    return layout.recompute_num_layers if layout.recompute is Recompute.FULL else -1


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
