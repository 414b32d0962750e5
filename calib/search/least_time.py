"""The least time that any variant of a cell takes: its passes one after another, nothing beside.

From the same operators, transfers and constants as the step itself, and never above it: what the
replicas share, the optimizer, messages between stages, launches of the host and what is computed
again only add to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..layers.blocks import (
    Block,
    BlockKind,
    attention_part,
    block,
    chunk_variants,
    experts_part,
)
from ..steps.known import Features
from ..steps.model import FittedSteps
from ..steps.scales import CONTENTION
from ..timeline.compiled import compile_blocks
from ..timeline.simulate import least_makespans
from ..workload.config import Recompute, RunConfig
from ..workload.parallelism import SCHEDULES
from .cells import Cells, Ints, groups
from .space import block_kinds

Floats = NDArray[np.float64]
RECOMPUTES = tuple(Recompute)
"""Columns of ``levels``."""
_ROUNDING = 1e-9
_PARTS_KIND = BlockKind.EXPERT_LAYER


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeastTimes:
    """Bounds of each cell."""

    time_s: Floats
    """Seconds below which no variant comes, shape (cells,)."""
    levels: Floats
    """What layouts alike leave of the log step time, by kind of recomputation, shape (cells, 3)."""

    @property
    def rows(self) -> Floats:
        """Both as one array with a row for each cell."""
        return np.column_stack([self.time_s, self.levels])

    @staticmethod
    def of_rows(rows: Floats) -> LeastTimes:
        """The inverse of ``rows``."""
        return LeastTimes(time_s=rows[:, 0], levels=rows[:, 1:])


def least_times(cells: Cells, steps: FittedSteps) -> LeastTimes:
    """Bounds of the median step time of every variant of each cell."""
    if not len(cells):
        return LeastTimes(time_s=np.empty(0), levels=np.empty((0, len(RECOMPUTES))))
    priced = _Priced(cells, steps)
    time_s = np.empty(len(cells))
    columns = cells.columns
    for members in groups(cells.distinct(columns["pp"], columns["vp"], columns["split"])[1]):
        time_s[members] = priced.pipelines(members)
    levels = _levels(cells, steps)
    return LeastTimes(time_s=time_s * np.exp(levels.min(axis=1)) * (1 - _ROUNDING), levels=levels)


class _Priced:
    """Seconds of blocks, in rows that cells share."""

    def __init__(self, cells: Cells, steps: FittedSteps) -> None:
        self._cells, self._steps = cells, steps
        columns = cells.columns
        self._pairs: list[tuple[Block, RunConfig]] = []
        self._rows: dict[BlockKind, list[Ints]] = {}
        names = ("tp", "cp", "micro", "is_split")
        is_cut = columns["pp"] > 1
        shared = cells.distinct(*(columns[name] for name in names), is_cut)
        for kind in block_kinds(cells.config):
            if kind is BlockKind.PREDICTION:
                continue  # never less than nothing
            made = attention_part if kind is _PARTS_KIND else _whole(kind)
            self._rows[kind] = [self._add(shared, made)]
        if cells.config.model.experts is not None:
            tokens = columns["micro"] * cells.config.model.seq_length // columns["cp"]
            split = cells.distinct(columns["tp"], columns["ep"], columns["etp"], tokens)
            self._rows[_PARTS_KIND].append(self._add(split, experts_part))
        self._price()

    def _add(self, distinct: tuple[Ints, Ints], made: Callable[[RunConfig], Block]) -> Ints:
        firsts, places = distinct
        begin = len(self._pairs)
        for first in firsts.tolist():
            config = self._cells.layout(first, is_plain=True)
            self._pairs.append((made(config), config))
        return begin + places

    def _price(self) -> None:
        compiled = compile_blocks(self._pairs, self._steps.base.conditions.weight_fracs)
        times_s, priced, theta = self._steps.priced(compiled)
        found = compiled.sums.times(
            times_s,
            contention=1.0 + priced.named(theta, CONTENTION),
            is_host_only=compiled.is_host_only,
        )
        self._forward_s = found.forward_pass_s[:, 0]
        self._backward_s = found.backward_pass_s[:, 0]
        host = [float(times_s[place, 0]) for place in compiled.hosts]
        config = self._cells.config
        self._host_s = [0.0 if config.is_step_replayed else time_s for time_s in host]
        self._grown = self._steps.growth(config, priced, theta)

    def _block_s(self, kind: BlockKind, members: Ints, passed_s: Floats) -> Floats:
        if kind not in self._rows:
            return np.zeros(len(members))
        return np.sum([passed_s[rows[members]] for rows in self._rows[kind]], axis=0)

    def pipelines(self, members: Ints) -> Floats:
        """Bounds of cells whose pipelines are cut alike."""
        sample = self._cells.layout(int(members[0]), is_plain=True)
        par = sample.parallelism
        number = self._cells.num_microbatches[members]
        forward, backward = self._chunks(sample, members)
        least = least_makespans(
            forward,
            backward,
            number,
            num_stages=par.pp,
            drains=not SCHEDULES[par.schedule].splits_backward,
        )
        idle = (par.pp - 1) / (par.vp * number)
        return (least + self._host_s[2]) * np.exp(self._grown(idle / (1.0 + idle)))

    def _chunks(self, sample: RunConfig, members: Ints) -> tuple[Floats, Floats]:
        """Seconds of one micro-batch in each chunk, shape (chunks, cells), both ways."""
        kinds: dict[BlockKind, tuple[Floats, Floats]] = {}
        rows = []
        for chunk in range(sample.parallelism.num_chunks):
            forward, backward = np.zeros(len(members)), np.zeros(len(members))
            for (kind, _), count in chunk_variants(sample, chunk):
                if kind not in kinds:
                    scale = self._effects(kind, members)
                    kinds[kind] = (
                        scale * self._block_s(kind, members, self._forward_s),
                        scale * self._block_s(kind, members, self._backward_s),
                    )
                forward += count * kinds[kind][0]
                backward += count * kinds[kind][1]
            rows.append((forward + self._host_s[0], backward + self._host_s[1]))
        return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])

    def _effects(self, kind: BlockKind, members: Ints) -> Floats | float:
        """The least factor that effects on layers may have."""
        if self._steps.posterior is None or kind not in (BlockKind.LAYER, _PARTS_KIND):
            return 1.0
        columns = {name: self._cells.columns[name][members] for name in ("tp", "micro")}
        part = self._cells.subset(members)
        firsts, places = part.distinct(columns["tp"], columns["micro"])
        logs = [self._steps.least_effect_log(part.layout(int(first))) for first in firsts]
        return np.exp(np.array(logs)[places])


def _whole(kind: BlockKind) -> Callable[[RunConfig], Block]:
    return lambda config: block(config, kind)


def _levels(cells: Cells, steps: FittedSteps) -> Floats:
    """Shape (cells, kinds of recomputation)."""
    out = np.zeros((len(cells), len(RECOMPUTES)))
    if steps.posterior is None:
        return out
    config, columns = cells.config, cells.columns
    model, par = config.model, config.parallelism
    names = ("tp", "pp", "cp", "ep", "micro", "vp", "dp")
    same = (model.hidden_size, model.num_layers, model.seq_length)
    node = par.ranks_per_node or cells.num_ranks
    sizes = np.stack(
        [
            *(columns[name] for name in names),
            *(np.full(len(cells), size) for size in same),
            columns["etp"],
            np.full(len(cells), node),
        ],
        axis=1,
    )
    for place, recompute in enumerate(RECOMPUTES):
        for is_split in (False, True):
            rows = columns["is_split"] == is_split
            kind = (config.fp8, recompute, config.framework, model.experts is None, is_split)
            kinds = np.empty((1, len(kind)), dtype=object)
            kinds[0] = kind
            shared = np.broadcast_to(kinds, (int(rows.sum()), len(kind)))
            out[rows, place] = steps.level_log(Features.of_columns(sizes[rows], shared))
    return out
