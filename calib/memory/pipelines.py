"""Peak memory of layouts: pipeline by pipeline, and stage by stage where stages differ."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from operator import attrgetter

import numpy as np

from ..layers.blocks import layer_kind
from ..layers.buckets import num_shards
from ..layers.recompute import RecomputeOption
from ..workload.config import RunConfig
from ..workload.layout_table import Ints, LayoutTable, all_but
from ._module_memory import SPLIT_FIELDS, Modules
from ._stage_memory import Pipeline, largest
from ._states import Floats, optimizer_nbytes, sharding_key, state_bytes

CONTEXT_NBYTES = 400 * 1024**2
"""Context of an accelerator, outside the allocator: 0.3 to 0.5 GB (okoge, 2025)."""
COMMUNICATOR_NBYTES = 500 * 10**6
"""Buffers of one NCCL communicator, also outside the allocator (okoge, 2025): a prior."""
_ROWS = 2**15
"""Layouts evaluated at once: their columns stay in the processor's cache."""


def needed_nbytes(table: LayoutTable) -> tuple[Floats, Floats]:
    """Return the bytes that the fullest stage of each layout allocates, and those outside the
    allocator, shape (layouts,) each.

    Of the stages between the first and the last, only the first with each sequence of layers is
    evaluated: another has no more passes in flight.
    """
    allocated = np.zeros(len(table))
    for rows, pipeline in pipelines(table):
        stages = _distinct_stages(pipeline.config)
        allocated[rows] = largest(pipeline.stage_bytes(stage).total for stage in stages)
    return allocated, overhead_nbytes(table)


def overhead_nbytes(table: LayoutTable) -> Floats:
    """Return the bytes of the context and of one communicator per group of more than one rank; 0 on
    the CPU."""
    tp, pp, cp, ep = (table.numbers(name) for name in ("tp", "pp", "cp", "ep"))
    copies, replicas = table.numbers("num_optimizer_instances"), table.numbers("dp") * cp
    experts = (ep > 1) & (expert_replicas(table) > 1)
    # Megatron creates a communicator for each of these that has more than one rank.
    groups = (tp > 1, pp > 1, replicas > 1, cp > 1, ep > 1, experts)
    # Ranks that share an instance of the optimizer, and those with the same shard of each.
    groups += ((copies > 1) & (replicas > copies), copies > 1)
    count = np.sum(groups, axis=0)
    devices, places = table.each(attrgetter("device"), ("device",))
    is_accelerator = np.array([device != "cpu" for device in devices])[places]
    return np.where(is_accelerator, CONTEXT_NBYTES + COMMUNICATOR_NBYTES * count, 0.0)


def expert_replicas(table: LayoutTable) -> Ints:
    """Return the replicas of the experts of each layout."""
    tp, etp = table.numbers("tp"), table.numbers("etp")
    ranks = tp * table.numbers("cp") * table.numbers("dp")
    return ranks // (np.where(etp > 0, etp, tp) * table.numbers("ep"))


def pipelines(table: LayoutTable) -> Iterator[tuple[Ints, Pipeline]]:
    """Yield indices of layouts with the same pipeline, and that pipeline, until every layout is
    in one."""
    _, runs = table.distinct(all_but(*SPLIT_FIELDS))
    for rows in _groups(runs):
        of_run = table if len(rows) == len(table) else table.take(rows)
        for members, pipeline in _of_run(of_run):
            yield rows[members], pipeline


def _of_run(table: LayoutTable) -> Iterator[tuple[Ints, Pipeline]]:
    """Yield the pipelines of layouts that differ in ``SPLIT_FIELDS`` only."""
    modules = Modules(table)
    options, option = table.each(
        RecomputeOption.from_config, ("recompute", "recompute_modules", "recompute_num_layers")
    )
    shards, expert_shards = _shards(table)
    optimizer, place = table.each(optimizer_nbytes, ("optimizer_offload_frac",))
    optimizer_of = np.array(optimizer)[place]
    firsts, alike = _alike(table)
    for rows in _groups(alike):
        config = table.config(int(firsts[alike[rows[0]]]))
        for part in np.split(rows, range(_ROWS, len(rows), _ROWS)):
            activations, layers = modules.take(part)
            yield (
                part,
                Pipeline(
                    config=config,
                    options=options,
                    option=option[part],
                    run=modules,
                    place=modules.places[part],
                    modules=activations,
                    layers=layers,
                    states=(
                        state_bytes(config, shards=shards[part], optimizer=optimizer_of[part]),
                        state_bytes(
                            config, shards=expert_shards[part], optimizer=optimizer_of[part]
                        ),
                    ),
                ),
            )


def _shards(table: LayoutTable) -> tuple[Floats, Floats]:
    """Return the ranks that share a gradient outside the experts, and of the experts."""
    names = ("num_optimizer_instances", "is_optimizer_distributed")
    replicas = table.numbers("dp") * table.numbers("cp")
    dense, rows = table.each(lambda one: num_shards(one.parallelism), names, replicas)
    expert, expert_rows = table.each(
        lambda one: num_shards(one.parallelism, is_expert=True), names, expert_replicas(table)
    )
    return np.array(dense, float)[rows], np.array(expert, float)[expert_rows]


def _alike(table: LayoutTable) -> tuple[Ints, Ints]:
    """Return the first layout of each pipeline with its sharding, and the pipeline of each."""
    pp, vp = table.numbers("pp"), table.numbers("vp")
    group = table.numbers("microbatch_group_size")
    group = np.where(group > 0, group, pp)
    # Beyond this number of micro-batches, passes in flight do not grow: see ``in_flight``.
    enough = np.where(vp > 1, (2 * pp // (group * vp) + 4) * group, 2 * pp)
    number = np.minimum(table.num_microbatches, enough)
    names = ("sharding", "is_optimizer_distributed", "regathers_weights", "keeps_grads_whole")
    keys, rows = table.each(sharding_key, names)
    numbers = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    sharded = np.array([numbers[key] for key in keys])[rows]
    return table.distinct(("pp", "vp", "chunk_layers", "recompute_span"), number, group, sharded)


def _groups(places: Ints) -> Iterator[Ints]:
    """Yield the indices of each value, in ascending order of values."""
    if not len(places):
        return
    narrow = places.astype(np.uint16) if places.max() < 2**16 else places
    order = np.argsort(narrow, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(places[order])) + 1)


def _distinct_stages(config: RunConfig) -> list[int]:
    """Return the first and the last stage, and of the others the first with each sequence of
    layers."""
    model, last = config.model, config.parallelism.pp - 1
    stages: dict[Hashable, int] = {}
    for stage in range(1, last):
        chunks = (config.layers_of(chunk) for chunk in config.chunks_of(stage))
        kinds = tuple(tuple(layer_kind(model, layer) for layer in chunk) for chunk in chunks)
        stages.setdefault(kinds, stage)
    return sorted({0, last, *stages.values()})
