"""Best-first search for the proven best layouts: exact evaluation in order of lower bounds.

The lower bound on the time of a cell's variants is the pipeline of its passes without anything
else.  It uses the same operators, transfers and constants as the step model and never exceeds it,
as data-parallel transfers, the optimizer, messages between stages, host launches and recompute
only add to it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..arguments import LayoutConstraint
from ..layers import (
    EXPERT_KINDS,
    LAYER_KINDS,
    Block,
    BlockKind,
    attention_part,
    block,
    chunk_variants,
    experts_part,
)
from ..memory import needed_nbytes
from ..steps import CONTENTION, FittedSteps, degrees_of_columns
from ..timeline import compile_blocks, least_makespans
from ..workload import Column, LayoutTable, Recompute, RunConfig
from .cells import Cells, Ints, cells_of, groups, num_variants
from .results import NUM_LACKING, Effort, Lacking, MemoryBudget, Proof, Ranked, SearchResult, Tally
from .space import block_kinds, num_nodes, recomputes, states
from .variants import Outcome, Study, rounded_log

_ROUNDING = 1e-9


class TimeBounds:
    """Lower bounds on the step time of cells.

    Bounds come first without experts, whose evaluation takes most of the work, then with them for
    cells for which it may matter.
    """

    def __init__(self, cells: Cells, steps: FittedSteps) -> None:
        self._cells, self._steps = cells, steps
        self._has_experts = cells.config.model.experts is not None
        self.levels = _levels(cells, steps)
        """Correction of the log step time from measured similar layouts, shape (cells,)."""
        self._pairs: list[tuple[Block, RunConfig]] = []
        names = ("tp", "cp", "micro", "is_split")
        columns = cells.columns
        shared = cells.distinct(*(columns[name] for name in names), columns["pp"] > 1)
        self._rows: dict[BlockKind, Ints] = {}
        for kind in block_kinds(cells.config):
            if kind is BlockKind.PREDICTION:
                continue  # bounded by zero
            made = _without_experts(kind) if kind in EXPERT_KINDS else _whole(kind)
            self._rows[kind] = self._add(shared, made)
        if len(cells):
            self._passes = _priced(self._pairs, steps)

    def bare(self) -> Floats:
        """Return lower bounds without the time of experts, seconds, shape (cells,)."""
        return self._bounds(np.arange(len(self._cells)), None)

    def whole(self, members: Ints) -> Floats:
        """Return lower bounds of some cells with experts, seconds, shape (members,)."""
        if not self._has_experts:
            return self._bounds(members, None)
        part = self._cells.subset(members)
        columns = part.columns
        tokens = columns["micro"] * part.config.model.seq_length // columns["cp"]
        firsts, places = part.distinct(columns["tp"], columns["ep"], columns["etp"], tokens)
        configs = [part.layout(int(first), is_plain=True) for first in firsts]
        if not configs:
            return np.empty(0)
        passes = _priced([(experts_part(config), config) for config in configs], self._steps)
        return self._bounds(members, passes.times_s[:, places])

    def _add(self, distinct: tuple[Ints, Ints], made: Callable[[RunConfig], Block]) -> Ints:
        firsts, places = distinct
        begin = len(self._pairs)
        for first in firsts.tolist():
            config = self._cells.layout(first, is_plain=True)
            self._pairs.append((made(config), config))
        return begin + places

    def _bounds(self, members: Ints, experts_s: Floats | None) -> Floats:
        """Return bounds; ``experts_s`` are both passes of a layer's experts, shape (2, members)."""
        cells = self._cells.subset(members)
        time_s = np.empty(len(cells))
        columns = cells.columns
        shapes = cells.distinct(columns["pp"], columns["vp"], columns["split"])[1]
        for alike in groups(shapes):
            alike_experts_s = None if experts_s is None else experts_s[:, alike]
            time_s[alike] = self._pipelines(members[alike], alike_experts_s)
        return time_s * np.exp(self.levels[members]) * (1 - _ROUNDING)

    def _pipelines(self, members: Ints, experts_s: Floats | None) -> Floats:
        """Return bounds of cells whose pipelines are split in the same way."""
        sample = self._cells.layout(int(members[0]), is_plain=True)
        par = sample.parallelism
        number = self._cells.num_microbatches[members]
        forward, backward = self._chunks(sample, members, experts_s)
        least = least_makespans(forward, backward, number, num_stages=par.pp)
        idle = (par.pp - 1) / (par.vp * number)
        growth = self._passes.growth(idle / (1.0 + idle))
        return (least + self._passes.host_s[2]) * np.exp(growth)

    def _chunks(self, sample: RunConfig, members: Ints, experts_s: Floats | None) -> Floats:
        """Return seconds of one micro-batch per chunk, both passes, shape (2, chunks, members)."""
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
        block_s = self._passes.times_s[:, self._rows[kind][members]]
        if kind in EXPERT_KINDS and experts_s is not None:
            block_s = block_s + experts_s
        return self._effects(kind, members) * block_s

    def _effects(self, kind: BlockKind, members: Ints) -> Floats | float:
        """Return the smallest factor that fitted effects on layers may have."""
        if self._steps.posterior is None or kind not in LAYER_KINDS:
            return 1.0
        columns = {name: self._cells.columns[name][members] for name in ("tp", "micro")}
        part = self._cells.subset(members)
        firsts, places = part.distinct(columns["tp"], columns["micro"])
        logs = [self._steps.least_effect_log(part.layout(int(first))) for first in firsts]
        return np.exp(np.array(logs)[places])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Passes:
    """Times of blocks, and of the host and waiting around them."""

    times_s: Floats
    """Forward and backward pass of one micro-batch, shape (2, blocks)."""
    host_s: tuple[float, float, float]
    """Host time of a forward pass, of a backward pass and of a step."""
    growth: Callable[[Floats], Floats]
    """Increase of the log step time as a function of the share of it that a stage waits."""


def _priced(pairs: Sequence[tuple[Block, RunConfig]], steps: FittedSteps) -> _Passes:
    compiled = compile_blocks(pairs)
    times_s, priced, theta = steps.priced(compiled)
    pass_times = compiled.sums.times(
        times_s,
        contention=1.0 + priced.named(theta, CONTENTION),
        is_host_only=compiled.is_host_only,
    )
    config = pairs[0][1]
    forward, backward, step = (float(times_s[place, 0]) for place in compiled.hosts)
    return _Passes(
        times_s=np.stack([pass_times.forward_pass_s[:, 0], pass_times.backward_pass_s[:, 0]]),
        host_s=(0.0, 0.0, 0.0) if config.is_step_replayed else (forward, backward, step),
        growth=steps.growth(config, priced, theta),
    )


def _without_experts(kind: BlockKind) -> Callable[[RunConfig], Block]:
    return lambda config: attention_part(config, kind)


def _whole(kind: BlockKind) -> Callable[[RunConfig], Block]:
    return lambda config: block(config, kind)


def _levels(cells: Cells, steps: FittedSteps) -> Floats:
    """Return corrections of the log step time, shape (cells,)."""
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


Floats = NDArray[np.float64]
_LEAST_FRAC = 0.8
"""Share of what the lightest usual variant of a cell needs, below which no variant is."""


def least_nbytes(cells: Cells) -> tuple[Floats, Floats]:
    """Return lower bounds of allocated and overhead bytes over all variants of each cell."""
    if not len(cells):
        return np.empty(0), np.empty(0)
    allocated, overhead = needed_nbytes(_lightest_table(cells))
    return _LEAST_FRAC * allocated, overhead


def _lightest_table(cells: Cells) -> LayoutTable:
    """Return the cells with all layers recomputed and all states sharded as far as they can be."""
    config, par = cells.config, cells.config.parallelism
    fields = {"micro": "micro_batch_size", "is_split": "is_sequence_parallel"}
    columns = {
        fields.get(name, name): Column.of_numbers(cells.columns[name])
        for name in ("tp", "cp", "ep", "etp", "pp", "vp", "dp", "micro")
    }
    flags = (False, True)
    columns["is_sequence_parallel"] = Column(values=flags, codes=cells.columns["is_split"])
    columns["chunk_layers"] = Column(values=cells.splits, codes=cells.columns["split"])
    shardings = tuple(one.get("sharding", par.sharding) for one in cells.shardings)
    columns["sharding"] = Column(values=shardings, codes=cells.columns["deep"])
    changes = {"microbatch_group_size": 0, "num_optimizer_instances": 1}
    base = replace(
        config,
        parallelism=replace(par, is_optimizer_distributed=True, **changes),
        recompute=Recompute.FULL,
        recompute_modules=(),
        recompute_num_layers=0,
        recompute_span=1,
        optimizer_offload_frac=max(one.offload_frac for one in states(cells.layout(0), 1)),
    )
    return LayoutTable(base=base, columns=columns, num_rows=len(cells))


_ROUND = 128
"""Cells per round: enough to vectorise, few enough that the limit falls quickly."""
_SMALL = 1000
"""Number of cells up to which experts of all are evaluated at once."""
_MOST_LACKING = 200
"""Limit of cells that are searched for layouts that nearly fit, for the report."""
_FRONT_FRAC, _EACH = 0.2, 10
"""Share of cells, by bounds without experts, that is sampled first, and the stride of the sample:
evaluated with experts, these quickly give a limit that few other cells are below."""
_ALIKE_FRAC = 2e-9
"""Tolerance of step times for rounding, relative."""


def best_layouts(
    config: RunConfig,
    steps: FittedSteps,
    num_ranks: int,
    *,
    budget: MemoryBudget | None = None,
    keep: LayoutConstraint | None = None,
    effort: Effort | None = None,
    is_listed: bool = True,
) -> SearchResult:
    """Return the best layouts of a run on ``num_ranks`` ranks.

    No two have equal degrees, micro-batch and sharding; the run's own is excluded if
    it has a row already.  If the
    search is stopped, these are the best so far, and ``gap_frac`` is the distance from a proof.
    """
    search = _Search(
        config,
        steps,
        num_ranks,
        budget or MemoryBudget(),
        keep or LayoutConstraint(),
        effort or Effort(),
        config if is_listed else None,
    )
    search.search()
    return search.result()


class _Search:
    def __init__(
        self,
        config: RunConfig,
        steps: FittedSteps,
        num_ranks: int,
        budget: MemoryBudget,
        keep: LayoutConstraint,
        effort: Effort,
        excluded: RunConfig | None,
    ) -> None:
        self._steps, self._budget, self._keep, self._effort = steps, budget, keep, effort
        self._running, self._excluded = config, excluded
        self._cells = cells_of(config, num_ranks, keep)
        self._best: list[Ranked] = []
        self._lacking: list[Lacking] = []
        self._tally = Tally()
        self._gap_frac = 0.0

    def search(self) -> None:
        """Bound all cells, and evaluate those that may be among the best."""
        able = self._fitting()
        self._effort.on_progress("bounds", 0.0)
        self._bounds = TimeBounds(able, self._steps)
        self._least_s = self._bounds.bare()
        self._study = Study(cells=able, steps=self._steps, budget=self._budget, keep=self._keep)
        self._evaluate()

    def _fitting(self) -> Cells:
        """Return the cells with variants that may fit in memory."""
        cells = self._cells
        self._effort.on_progress("memory", 0.0)
        least, overhead = least_nbytes(cells)
        is_able = np.asarray(self._budget.holds(least, overhead))
        over = np.flatnonzero(~is_able)
        nearest = over[np.argsort((least + overhead)[over], kind="stable")[:_MOST_LACKING]]
        for place in nearest.tolist():
            if len(self._lacking) == NUM_LACKING:
                break
            layout = _lightest_allowed(cells.layout(place), self._keep)
            if layout is not None:
                nbytes = float(least[place] + overhead[place])
                self._lacking.append(Lacking(config=layout, needed_nbytes=nbytes))
        self._tally.over_memory += num_variants(cells.subset(over))
        return cells.subset(np.flatnonzero(is_able))

    def _evaluate(self) -> None:
        """Evaluate rounds of cells until no bound is below the limit."""
        cells = self._study.cells
        self._is_open = np.ones(len(cells), dtype=bool)
        self._take(self._study.measured(self._running, self._cells.num_ranks))
        if cells.config.model.experts is not None:
            self._price_experts()
        self._rounds(self._in_order(np.flatnonzero(self._is_open)))
        self._tally.bounded += num_variants(cells.subset(np.flatnonzero(self._is_open)))

    def _price_experts(self) -> None:
        """Replace bounds by those with experts for cells that they may exclude."""
        number = len(self._least_s)
        front = np.empty(0, dtype=np.int64)
        if number > _SMALL:
            first = self._in_order(np.arange(number))[: int(_FRONT_FRAC * number)]
            front = np.sort(first[::_EACH])
            self._least_s[front] = self._bounds.whole(front)
            self._rounds(self._in_order(front)[:_ROUND])
        if not self._effort.is_stopped():
            is_bare = self._is_open & (self._least_s < self._limit_s)
            is_bare[front] = False
            rest = np.flatnonzero(is_bare)
            self._least_s[rest] = self._bounds.whole(rest)

    def _in_order(self, members: Ints) -> Ints:
        """Return the cells in ascending order of their bounds."""
        return members[np.argsort(self._least_s[members], kind="stable")]

    def _rounds(self, order: Ints) -> None:
        """Evaluate cells in this order as long as their bounds are below the limit."""
        least_s = self._least_s
        for begin in range(0, len(order), _ROUND):
            limit_s = self._limit_s
            members = order[begin : begin + _ROUND]
            members = members[least_s[members] < limit_s]
            if not len(members):
                return
            if self._effort.is_stopped():
                best_s = self._others[0].time_s if self._others else np.inf
                unseen_s = float(least_s[self._is_open].min())
                self._gap_frac = max(0.0, 1.0 - unseen_s / best_s)
                return
            self._take(self._study.examine(members, limit_s))
            self._is_open[members] = False
            remaining = int((least_s[self._is_open] < self._limit_s).sum())
            self._effort.on_progress("layouts", begin / max(begin + remaining, 1))

    @property
    def _limit_s(self) -> float:
        """Step time from which layouts are not among the best."""
        others = self._others
        if len(others) < self._effort.top:
            return np.inf
        return others[-1].time_s * (1 + _ALIKE_FRAC)

    @property
    def _others(self) -> list[Ranked]:
        """The best so far without the excluded layout, which may be first in its row."""
        return [one for one in self._best if one.config != self._excluded][: self._effort.top]

    def _take(self, outcome: Outcome) -> None:
        self._tally.add(outcome.tally)
        self._lacking += outcome.lacking
        by_row: dict[Hashable, Ranked] = {}
        for one in sorted((*self._best, *outcome.best), key=_rank):
            by_row.setdefault(_row(one.config), one)
        self._best = list(by_row.values())[: self._effort.top + 1]

    def result(self) -> SearchResult:
        """Return the result of the search."""
        lacking = sorted(self._lacking, key=lambda one: one.needed_nbytes)[:NUM_LACKING]
        return SearchResult(
            best=tuple(self._others),
            lacking=tuple(one.config for one in lacking if one.config != self._excluded),
            proof=Proof(
                num_cells=len(self._cells),
                tally=self._tally,
                cut=self._cells.cut,
                gap_frac=self._gap_frac,
            ),
        )


def _lightest_allowed(layout: RunConfig, keep: LayoutConstraint) -> RunConfig | None:
    """Return a requested variant with low memory: sharded states and most recompute; else None."""
    for choice in reversed(states(layout, num_nodes(layout))):
        for recompute in reversed(recomputes(layout)):
            variant = recompute.applied_to(choice.of(layout))
            if not variant.optimizer_offload_frac and keep.allows(variant):
                return variant
    return None


def _rank(one: Ranked) -> tuple[float, int]:
    return rounded_log(one.time_s), one.order


def _row(config: RunConfig) -> Hashable:
    """Return the key of a row: degrees, micro-batch and sharding."""
    par = config.parallelism
    degrees = (par.tp, par.cp, par.ep, par.expert_tp, par.pp, par.vp, par.dp)
    return (*degrees, config.batch.micro_batch_size, par.sharded)
