"""Peak memory of many layouts of one model at once, for a planner."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields

import numpy as np
import numpy.typing as npt

from ..layers.buckets import num_shards
from ..workload.config import RunConfig
from .block_memory import ModuleBytes, module_bytes
from .peak import overhead_nbytes, stage_parts
from .states import sharding_key, state_bytes

Floats = npt.NDArray[np.float64]


def peaks_nbytes(layouts: Sequence[RunConfig]) -> Floats:
    """Bytes of the fullest stage of each layout, context and communicators included.

    Shape (layouts,).
    """
    allocated, overhead = needed_nbytes(layouts)
    return allocated + overhead


def needed_nbytes(layouts: Sequence[RunConfig]) -> tuple[Floats, Floats]:
    """What the fullest stage of each layout has allocated, and what lies beside the allocator,
    shape (layouts,) each.

    The same arithmetic as ``memory``, which every entry equals to the byte; layouts of one run with
    equal chunks are done together.
    """
    names = [field.name for field in fields(ModuleBytes)]
    known: dict[Hashable, int] = {}
    all_modules: list[ModuleBytes] = []
    index = np.empty(len(layouts), dtype=int)
    alike: dict[Hashable, list[int]] = {}
    for place, layout in enumerate(layouts):
        index[place] = known.setdefault(_split_key(layout), len(all_modules))
        if index[place] == len(all_modules):
            all_modules.append(module_bytes(layout))
        alike.setdefault(_pipeline_key(layout), []).append(place)
    table = np.array(
        [[getattr(modules, name) for name in names] for modules in all_modules],
        dtype=float,
    )
    overhead = np.array([overhead_nbytes(c.parallelism, c.device) for c in layouts], dtype=float)
    allocated = np.empty(len(layouts))
    for places in alike.values():
        columns = dict(zip(names, table[index[places]].T, strict=True))
        allocated[places] = _fullest([layouts[place] for place in places], ModuleBytes(**columns))
    return allocated, overhead


def _split_key(layout: RunConfig) -> Hashable:
    """What ``module_bytes`` depends on: the degrees that split a layer, and what is recomputed."""
    par = layout.parallelism
    degrees = (par.tp, par.cp, par.ep, par.expert_tp, par.is_sequence_parallel)
    again = layout.recompute, layout.recompute_modules
    return (*degrees, layout.batch.micro_batch_size, *again)


def _pipeline_key(layout: RunConfig) -> Hashable:
    """What the chunks of a stage and the passes that it holds depend on."""
    par = layout.parallelism
    group = par.microbatch_group_size or par.pp
    # With more micro-batches than this a schedule holds no more: see ``in_flight``.
    enough = (2 * par.pp // (group * par.vp) + 4) * group if par.vp > 1 else 2 * par.pp
    num = min(layout.num_microbatches, enough)
    shape = (par.pp, par.vp, num, group, par.chunk_layers, par.schedule)
    return (*shape, *sharding_key(layout), *_recompute_key(layout))


def _recompute_key(layout: RunConfig) -> tuple[Hashable, ...]:
    return layout.recompute, layout.recompute_num_layers, layout.recompute_modules


def _fullest(layouts: list[RunConfig], all_modules: ModuleBytes) -> Floats:
    """Allocated bytes of the fullest stage, of layouts with the same chunks."""
    par = [layout.parallelism for layout in layouts]
    state = state_bytes(
        layouts[0],
        shards=np.array([num_shards(p) for p in par]),
        expert_shards=np.array([num_shards(p, is_expert=True) for p in par]),
    )
    stages = (
        stage_parts(layouts[0], all_modules, state, stage).total for stage in _unlike(layouts[0])
    )
    return np.max([np.broadcast_to(total, len(par)) for total in stages], axis=0)


def _unlike(layout: RunConfig) -> list[int]:
    """The first and the last stage, and of those between the first that holds as many layers.

    A stage holds no more passes than the one before it.
    """
    model, last = layout.model, layout.parallelism.pp - 1
    found: dict[tuple[tuple[int, int], ...], int] = {}
    for stage in range(1, last):
        held = [layout.layers_of(chunk) for chunk in layout.chunks_of(stage)]
        counts = tuple((len(layers), sum(map(model.has_experts, layers))) for layers in held)
        found.setdefault(counts, stage)
    return sorted({0, last, *found.values()})
