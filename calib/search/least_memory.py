"""The least that any variant of a cell keeps, whatever is computed again, spread or offloaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from ..memory.module_memory import ModuleBytes, module_bytes
from ..memory.peak import overhead_nbytes, stage_chunks, stage_parts
from ..memory.states import StateBytes, state_bytes
from ..workload.config import Recompute, RunConfig
from .cells import Cells, Ints, groups
from .space import states

Floats = NDArray[np.float64]
_OF_EXPERTS = (
    *("expert_layer_numel", "expert_numel", "expert_weights_extra"),
    *("prediction_numel", "prediction_expert_numel"),
)
"""What depends on how experts are split, and on nothing else of a cell but tp."""
_FREED = ("dense_working", "dense_again", "expert_working", "expert_again", "expert_scratch")
"""What a variant may do without at the fullest moment, as far as a bound need know, and what hangs
on how experts are split."""
_MIDDLE = 2
"""Stages at each end that are looked at: the first hold most passes, the last the logits."""


def least_nbytes(cells: Cells) -> Floats:
    """Bytes that every variant of each cell has allocated at least, shape (cells,).

    Weights, gradients and states as widely spread as the host can spread them, the input of each
    layer in flight, and the loss; without what a layer works with.  Context and communicators are
    not in it (``overhead``).
    """
    return _Least(cells).nbytes()


def overheads(cells: Cells) -> Floats:
    """Least bytes of context and communicators of each cell, which the allocator does not see: of
    one instance of the optimizer, since several have groups of their own."""
    names = ("tp", "pp", "dp", "cp", "ep", "etp")
    keys, places = cells.distinct(*(cells.columns[name] for name in names))
    layouts = (cells.layout(int(first)).parallelism for first in keys)
    of_keys = [
        float(overhead_nbytes(replace(par, num_optimizer_instances=1), cells.config.device))
        for par in layouts
    ]
    return np.array(of_keys)[places] if of_keys else np.empty(0)


class _Least:
    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._table = self._modules()

    def nbytes(self) -> Floats:
        out = np.zeros(len(self._cells))
        for members in self._alike():
            sample = self._cells.layout(int(members[0]))
            modules = ModuleBytes(**{name: found[members] for name, found in self._table.items()})
            state = self._states(sample, members)
            last = sample.parallelism.pp - 1
            stages = {*range(min(_MIDDLE, last + 1)), *range(max(0, last - _MIDDLE + 1), last + 1)}
            for stage in sorted(stages):
                found = _stage(sample, modules, state, stage)
                out[members] = np.maximum(out[members], found)
        return out

    def _modules(self) -> dict[str, Floats]:
        """The fields of ``ModuleBytes`` of each cell, with all layers computed again."""
        columns = self._cells.columns
        names = ("tp", "cp", "micro", "is_split")
        is_cut = columns["pp"] > 1
        whole, of_whole = self._fields(*(columns[name] for name in names), is_cut)
        split, of_split = self._fields(*(columns[name] for name in ("tp", "ep", "etp")))
        table = {
            name: (split[name][of_split] if name in _OF_EXPERTS else whole[name][of_whole])
            for name in whole
        }
        for name in _FREED:
            table[name] = np.zeros(len(self._cells))
        for kind in ("dense", "expert"):
            table[f"{kind}_kept"] = table["layer_input"]
        return table

    def _fields(self, *keys: NDArray[np.int64 | np.bool_]) -> tuple[dict[str, Floats], Ints]:
        firsts, places = self._cells.distinct(*keys)
        rows = [
            module_bytes(_all_again(self._cells.layout(int(first), is_plain=True)))
            for first in firsts
        ]
        columns = {
            field.name: np.array([float(getattr(row, field.name)) for row in rows])
            for field in fields(ModuleBytes)
        }
        return columns, places

    def _alike(self) -> Iterator[Ints]:
        """Cells whose stages hold as many layers and passes."""
        columns = self._cells.columns
        pp, vp = columns["pp"], columns["vp"]
        # With more micro-batches than this a schedule holds no more: see ``in_flight``.
        most = np.where(vp > 1, (2 // vp + 4) * pp, 2 * pp)
        number = np.minimum(self._cells.num_microbatches, most)
        keys = (pp, vp, columns["split"], number, columns["deep"])
        yield from groups(self._cells.distinct(*keys)[1])

    def _states(self, sample: RunConfig, members: Ints) -> StateBytes:
        """Bytes per parameter where they are spread most."""
        columns = {name: found[members] for name, found in self._cells.columns.items()}
        deep = bool(columns["deep"][0])
        choices = states(sample, 1)
        is_spread = deep or any(
            one.of(sample).parallelism.is_optimizer_distributed for one in choices
        )
        frac = max(one.offload_frac for one in choices)
        spread = replace(
            sample.parallelism,
            is_optimizer_distributed=is_spread,
            num_optimizer_instances=1 if not deep else sample.parallelism.num_optimizer_instances,
        )
        layout = replace(sample, parallelism=spread, optimizer_offload_frac=frac)
        if not is_spread:
            return state_bytes(layout, shards=1.0, expert_shards=1.0)
        instances = spread.num_optimizer_instances
        replicas = columns["dp"] * columns["cp"]
        ranks = columns["tp"] * replicas
        expert = ranks // (columns["ep"] * columns["etp"])
        return state_bytes(
            layout,
            shards=np.maximum(1, replicas // instances).astype(float),
            expert_shards=np.maximum(1, expert // instances).astype(float),
        )


def _all_again(layout: RunConfig) -> RunConfig:
    return replace(layout, recompute=Recompute.FULL)


def _stage(sample: RunConfig, modules: ModuleBytes, state: StateBytes, stage: int) -> Floats:
    found = stage_parts(sample, modules, state, stage, stage_chunks(sample, stage))
    return np.asarray(found.total, dtype=float)
