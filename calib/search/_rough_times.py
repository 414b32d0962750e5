"""Rough step times, by which layouts are ranked before they are timed: the passes alone.

A layout's step is never shorter than its rough time: what that leaves out (transfers between stages
and replicas, the optimizer, launches, overlap with other micro-batches) only adds to it.  Operators
and transfers of a pass have the times of the step model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..layers.blocks import EXPERT_KINDS, LAYER_KINDS, Block, BlockKind, block_part, chunk_variants
from ..steps.model import FittedSteps
from ..workload.config import RunConfig
from ..workload.layout_table import LayoutTable, all_but, groups

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_ROUNDING = 1e-9
_CHUNKS = ("pp", "vp", "chunk_layers", "recompute", "recompute_num_layers", "wide_layers")
_PASSES = all_but(
    *("pp", "vp", "dp", "chunk_layers", "global_batch_size", "recompute_num_layers"),
    *("recompute_span", "optimizer_offload_frac", "is_optimizer_distributed", "sharding"),
    *("num_optimizer_instances", "overlaps_grad_reduce", "overlaps_param_gather"),
)
"""Fields that the passes of a block depend on; of the stages only whether there are several."""
_OUTSIDE = tuple(name for name in _PASSES if name not in ("ep", "etp"))
"""Those of operators outside experts."""
_EXPERTS = tuple(name for name in _PASSES if name not in ("cp", "micro_batch_size"))
"""Those of experts; context parallelism and micro-batch matter through the tokens of a rank."""


def rough_times(table: LayoutTable, steps: FittedSteps) -> Floats:
    """Return rough step times in seconds, shape (layouts,)."""
    if not len(table):
        return np.empty(0)
    return _Passes(table=table).times(steps)


@dataclass(kw_only=True, eq=False)
class _Passes:
    table: LayoutTable
    _pairs: list[tuple[Block, RunConfig]] = field(default_factory=list)
    _rows: dict[tuple[BlockKind, bool], list[Ints]] = field(default_factory=dict)
    """Rows of the priced parts of each block, shape (layouts,)."""

    def times(self, steps: FittedSteps) -> Floats:
        table = self.table
        chunks = table.coded(_chunks, _CHUNKS)
        every = (block for _, of_chunks in chunks.values for one in of_chunks for block, _ in one)
        for kind, is_recomputed in dict.fromkeys(every):
            if kind is not BlockKind.PREDICTION:  # which may take no time
                self._rows[kind, is_recomputed] = [*self._parts(kind, is_recomputed)]
        passes = steps.passes(self._pairs)
        effects, places = table.each(steps.least_effect_log, ("model", "tp", "micro_batch_size"))
        effect = np.exp(np.array(effects)[places])
        time_s = np.empty(len(table))
        for rows in groups(chunks.codes):
            num_stages, of_chunks = chunks.value(int(rows[0]))
            chunk_s = np.empty((2, len(of_chunks), len(rows)))
            for place, variants in enumerate(of_chunks):
                chunk_s[:, place] = passes.hosts_s[:2, np.newaxis]
                for (kind, is_recomputed), count in variants:
                    for part in self._rows.get((kind, is_recomputed), ()):
                        factor = count * (effect[rows] if kind in LAYER_KINDS else 1.0)
                        chunk_s[:, place] += factor * passes.times_s[:, part[rows]]
            time_s[rows] = _pipelines(chunk_s, table.num_microbatches[rows], num_stages)
        return (time_s + passes.hosts_s[2]) * np.exp(passes.scale_log(table)) * (1 - _ROUNDING)

    def _parts(self, kind: BlockKind, is_recomputed: bool) -> Iterator[Ints]:
        table = self.table
        outside = table.distinct(_OUTSIDE, table.numbers("pp") > 1)
        yield self._priced(outside, kind, is_recomputed, of_experts=False)
        if kind in EXPERT_KINDS:
            share = table.base.model.seq_length // table.numbers("cp")
            tokens = table.numbers("micro_batch_size") * share
            experts = table.distinct(_EXPERTS, tokens)
            yield self._priced(experts, kind, is_recomputed, of_experts=True)

    def _priced(
        self, distinct: tuple[Ints, Ints], kind: BlockKind, is_recomputed: bool, *, of_experts: bool
    ) -> Ints:
        """Enter one part of a block of each distinct layout; return the row of each layout."""
        firsts, places = distinct
        begin = len(self._pairs)
        for first in firsts.tolist():
            config = self.table.config(first)
            part = block_part(config, kind, is_recomputed=is_recomputed, of_experts=of_experts)
            self._pairs.append((part, config))
        return begin + places


_Chunk = tuple[tuple[tuple[BlockKind, bool], int], ...]


def _chunks(config: RunConfig) -> tuple[int, tuple[_Chunk, ...]]:
    """Return the number of stages, and of each chunk the kinds of blocks, whether they are
    recomputed, and their numbers."""
    par = config.parallelism
    chunks = (chunk_variants(config, chunk) for chunk in range(par.num_chunks))
    return par.pp, tuple(tuple((block[:2], n) for block, n in one) for one in chunks)


def _pipelines(chunk_s: Floats, num_microbatches: Ints, num_stages: int) -> Floats:
    """Return the time of pipelines without messages, shape (layouts,), from that of the passes of
    each chunk, shape (2, chunks, layouts).

    A stage begins when a micro-batch has passed those before it, runs all its passes in sequence,
    and the last gradient passes the earlier stages once more: no schedule is shorter.

    >>> passes_s = np.array([[[1.0]] * 4, [[2.0]] * 4])
    >>> _pipelines(passes_s, np.array([8]), 4).tolist()
    [33.0]
    """
    chunks = chunk_s.reshape(2, -1, num_stages, chunk_s.shape[-1])
    busy_s = num_microbatches * chunks.sum(axis=(0, 1))
    busy_s[1:] += np.cumsum(chunks[:, 0, :-1].sum(axis=0), axis=0)
    return busy_s.max(axis=0)
