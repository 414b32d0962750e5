"""The least time that any variant of a cell takes: its passes one after another, nothing beside.

From the same operators, transfers and constants as the step itself, and never above it: what the
replicas share, the optimizer, messages between stages, launches of the host and what is computed
again only add to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from ..steps.known import degrees_of_columns
from ..steps.model import FittedSteps
from ..steps.scales import CONTENTION
from ..timeline.compiled import compile_blocks
from ..timeline.costs import least_makespans
from ..workload.config import RunConfig
from ..workload.parallelism import SCHEDULES
from .cells import Cells, Ints, groups
from .space import block_kinds

Floats = NDArray[np.float64]
_ROUNDING = 1e-9
_PARTS_KIND = BlockKind.EXPERT_LAYER


class TimeBounds:
    """Bounds of cells, first without the experts of their layers, whose prices take most of the
    work, and then with them where that may matter."""

    def __init__(self, cells: Cells, steps: FittedSteps) -> None:
        self._cells, self._steps = cells, steps
        self._has_experts = cells.config.model.experts is not None
        self.levels = _levels(cells, steps)
        """What layouts alike leave of the log step time, shape (cells,)."""
        self._pairs: list[tuple[Block, RunConfig]] = []
        names = ("tp", "cp", "micro", "is_split")
        columns = cells.columns
        shared = cells.distinct(*(columns[name] for name in names), columns["pp"] > 1)
        self._rows: dict[BlockKind, Ints] = {}
        for kind in block_kinds(cells.config):
            if kind is BlockKind.PREDICTION:
                continue  # never less than nothing
            made = attention_part if kind is _PARTS_KIND else _whole(kind)
            self._rows[kind] = self._add(shared, made)
        if len(cells):
            self._passes = _priced(self._pairs, steps)

    def bare(self) -> Floats:
        """Seconds below which no variant comes, whatever experts take, shape (cells,)."""
        return self._bounds(np.arange(len(self._cells)), None)

    def whole(self, members: Ints) -> Floats:
        """The same of some cells with all that their layers do, shape (members,)."""
        if not self._has_experts:
            return self._bounds(members, None)
        part = self._cells.subset(members)
        columns = part.columns
        tokens = columns["micro"] * part.config.model.seq_length // columns["cp"]
        firsts, places = part.distinct(columns["tp"], columns["ep"], columns["etp"], tokens)
        configs = [part.layout(int(first), is_plain=True) for first in firsts]
        if not configs:
            return np.empty(0)
        found = _priced([(experts_part(config), config) for config in configs], self._steps)
        return self._bounds(members, found.times_s[:, places])

    def _add(self, distinct: tuple[Ints, Ints], made: Callable[[RunConfig], Block]) -> Ints:
        firsts, places = distinct
        begin = len(self._pairs)
        for first in firsts.tolist():
            config = self._cells.layout(first, is_plain=True)
            self._pairs.append((made(config), config))
        return begin + places

    def _bounds(self, members: Ints, experts_s: Floats | None) -> Floats:
        """``experts_s``: both passes of the experts of a layer, shape (2, members)."""
        cells = self._cells.subset(members)
        time_s = np.empty(len(cells))
        columns = cells.columns
        shapes = cells.distinct(columns["pp"], columns["vp"], columns["split"])[1]
        for alike in groups(shapes):
            beside = None if experts_s is None else experts_s[:, alike]
            time_s[alike] = self._pipelines(members[alike], beside)
        return time_s * np.exp(self.levels[members]) * (1 - _ROUNDING)

    def _pipelines(self, members: Ints, experts_s: Floats | None) -> Floats:
        """Bounds of cells whose pipelines are cut alike."""
        sample = self._cells.layout(int(members[0]), is_plain=True)
        par = sample.parallelism
        number = self._cells.num_microbatches[members]
        forward, backward = self._chunks(sample, members, experts_s)
        least = least_makespans(
            forward,
            backward,
            number,
            num_stages=par.pp,
            drains=not SCHEDULES[par.schedule].splits_backward,
        )
        idle = (par.pp - 1) / (par.vp * number)
        growth = self._passes.growth(idle / (1.0 + idle))
        return (least + self._passes.host_s[2]) * np.exp(growth)

    def _chunks(self, sample: RunConfig, members: Ints, experts_s: Floats | None) -> Floats:
        """Seconds of one micro-batch in each chunk, both ways, shape (2, chunks, members)."""
        kinds: dict[BlockKind, Floats] = {}
        host_s = np.array(self._passes.host_s[:2])[:, np.newaxis]
        out = np.empty((2, sample.parallelism.num_chunks, len(members)))
        for chunk in range(sample.parallelism.num_chunks):
            out[:, chunk] = host_s
            for (kind, *_), count in chunk_variants(sample, chunk):
                if kind not in kinds:
                    kinds[kind] = self._block_s(kind, members, experts_s)
                out[:, chunk] += count * kinds[kind]
        return out

    def _block_s(self, kind: BlockKind, members: Ints, experts_s: Floats | None) -> Floats:
        if kind not in self._rows:
            return np.zeros((2, len(members)))
        found = self._passes.times_s[:, self._rows[kind][members]]
        if kind is _PARTS_KIND and experts_s is not None:
            found = found + experts_s
        return self._effects(kind, members) * found

    def _effects(self, kind: BlockKind, members: Ints) -> Floats | float:
        """The least factor that effects on layers may have."""
        if self._steps.posterior is None or kind not in (BlockKind.LAYER, _PARTS_KIND):
            return 1.0
        columns = {name: self._cells.columns[name][members] for name in ("tp", "micro")}
        part = self._cells.subset(members)
        firsts, places = part.distinct(columns["tp"], columns["micro"])
        logs = [self._steps.least_effect_log(part.layout(int(first))) for first in firsts]
        return np.exp(np.array(logs)[places])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Passes:
    """What blocks take, and what stands around them."""

    times_s: Floats
    """Forward and backward pass of one micro-batch, shape (2, blocks)."""
    host_s: tuple[float, float, float]
    """The host's part of a forward pass, of a backward pass and of a step."""
    growth: Callable[[Floats], Floats]
    """What is added to the log of a step, by the share of it that a stage waits."""


def _priced(pairs: Sequence[tuple[Block, RunConfig]], steps: FittedSteps) -> _Passes:
    compiled = compile_blocks(pairs, steps.base.conditions.weight_fracs)
    times_s, priced, theta = steps.priced(compiled)
    found = compiled.sums.times(
        times_s,
        contention=1.0 + priced.named(theta, CONTENTION),
        is_host_only=compiled.is_host_only,
    )
    config = pairs[0][1]
    forward, backward, step = (float(times_s[place, 0]) for place in compiled.hosts)
    return _Passes(
        times_s=np.stack([found.forward_pass_s[:, 0], found.backward_pass_s[:, 0]]),
        host_s=(0.0, 0.0, 0.0) if config.is_step_replayed else (forward, backward, step),
        growth=steps.growth(config, priced, theta),
    )


def _whole(kind: BlockKind) -> Callable[[RunConfig], Block]:
    return lambda config: block(config, kind)


def _levels(cells: Cells, steps: FittedSteps) -> Floats:
    """Shape (cells,)."""
    model, columns = cells.config.model, cells.columns
    names = ("tp", "pp", "cp", "ep", "micro", "vp", "dp")
    same = (model.hidden_size, model.num_layers, model.seq_length)
    sizes = np.stack(
        [
            *(columns[name] for name in names),
            *(np.full(len(cells), size) for size in same),
        ],
        axis=1,
    )
    return steps.level_log(degrees_of_columns(sizes))
