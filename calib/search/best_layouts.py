"""The best layouts of a run: all are tried, in the order of their rough times."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from ..arguments.short_names import LayoutConstraint
from ..layers.recompute import RecomputeOption
from ..memory.pipelines import needed_nbytes
from ..steps.known_steps import same_layout
from ..steps.model import FittedSteps
from ..workload.config import Recompute, RunConfig
from ..workload.layout_table import Column, LayoutTable, groups
from ._rough_times import rough_times
from .cells import Cells, Choices, Ints, cells_of, choices_of, num_variants
from .results import (
    ANY_MEMORY,
    NUM_LACKING,
    Effort,
    Floats,
    MemoryBudget,
    Ranked,
    SearchResult,
    Tried,
)
from .space import States

_FIRST_CELLS, _CELLS = 16, 128
"""Cells of the first round and of each further one: few, so that the limit falls quickly, and
enough to vectorise."""
_VARIANTS = 512
"""Variants that are timed at once."""
_MOST_LACKING = 200
"""Cells that are searched for layouts that nearly fit, for the report."""
_ALIKE_FRAC = 2e-9
"""Tolerance of step times for rounding, relative."""
_DECIMALS = 9
"""Decimals of a log step time; layouts that agree in these tie."""


def best_layouts(
    config: RunConfig,
    steps: FittedSteps,
    num_ranks: int,
    *,
    budget: MemoryBudget = ANY_MEMORY,
    keep: LayoutConstraint | None = None,
    effort: Effort | None = None,
    is_listed: bool = True,
) -> SearchResult:
    """Return the best layouts of a run on ``num_ranks`` ranks.

    No two have equal degrees, micro-batch and sharding; the run's own is excluded if
    it has a row already.  If the search is stopped, these are the best so far.
    """
    search = _Search(
        cells_of(config, num_ranks, keep),
        steps,
        budget,
        keep or LayoutConstraint(),
        effort or Effort(),
        config if is_listed else None,
    )
    search.take_measured(config, num_ranks)
    return search.result()


class _Search:
    def __init__(
        self,
        cells: Cells,
        steps: FittedSteps,
        budget: MemoryBudget,
        keep: LayoutConstraint,
        effort: Effort,
        excluded: RunConfig | None,
    ) -> None:
        self._cells, self._steps, self._budget = cells, steps, budget
        self._keep, self._effort, self._excluded = keep, effort, excluded
        self._choices = choices_of(cells, keep)
        self._best: dict[Hashable, tuple[tuple[float, int], Ranked]] = {}
        """The fastest layout of each row so far, with its sort key."""
        self._over_memory = self._evaluated = self._not_tried = 0

    def take_measured(self, running: RunConfig, num_ranks: int) -> None:
        """Enter layouts with measured steps, which may be shorter than their rough times."""
        known = dict.fromkeys(one.config for one in self._steps.known if not one.site)
        alike = [
            _written_as(config, running)
            for config in known
            if _is_alike(config, running, num_ranks) and self._keep.allows(config)
        ]
        if alike:
            table = LayoutTable.of(alike)
            fits = np.flatnonzero(self._budget.holds(*needed_nbytes(table)))
            last = len(self._cells) * _ORDERS
            self._take(table.take(fits), np.full(len(fits), last))

    def result(self) -> SearchResult:
        """Try all layouts and return the best."""
        self._effort.on_progress("memory", 0.0)
        able, lacking = self._fitting()
        self._effort.on_progress("rough times", 0.0)
        rough_s = rough_times(self._cells.subset(able).plain, self._steps)
        order = np.argsort(rough_s, kind="stable")
        able, rough_s = able[order], rough_s[order]
        begin, number = 0, _FIRST_CELLS
        while begin < len(able) and rough_s[begin] < self._limit_s:
            if self._effort.is_stopped():
                self._not_tried = num_variants(self._choices.take(able[begin:]))
                break
            end = begin + number
            self._round(able[begin:end][rough_s[begin:end] < self._limit_s])
            begin, number = end, _CELLS
            num_open = int((rough_s[begin:] < self._limit_s).sum())
            self._effort.on_progress("layouts", begin / max(begin + num_open, 1))
        return SearchResult(
            best=tuple(self._others),
            lacking=lacking,
            tried=Tried(
                num_cells=len(self._cells),
                num_layouts=num_variants(self._choices),
                over_memory=self._over_memory,
                evaluated=self._evaluated,
                not_tried=self._not_tried,
                cut=self._cells.cut,
            ),
        )

    def _fitting(self) -> tuple[Ints, tuple[RunConfig, ...]]:
        """Return the cells with variants that fit in memory, and layouts that lack least."""
        least_nbytes = np.full(len(self._cells), np.inf)
        fits = np.zeros(len(self._cells), dtype=bool)
        for lightest in (_most_recomputed, _all_modules, _none_recomputed):
            members = np.flatnonzero(~fits)
            light = self._choices.take(members)
            variants = _Variants.of(self._cells, members, _each(light, lightest))
            if not len(variants.table):
                continue
            needed = needed_nbytes(variants.table)
            fits[variants.cells] |= self._budget.holds(*needed)
            np.minimum.at(least_nbytes, variants.cells, sum(needed))
        over = np.flatnonzero(~fits)
        self._over_memory = num_variants(self._choices.take(over))
        nearest = over[np.argsort(least_nbytes[over], kind="stable")[:_MOST_LACKING]]
        return np.flatnonzero(fits), self._lacking(nearest)

    def _lacking(self, members: Ints) -> tuple[RunConfig, ...]:
        """Return layouts of cells that do not fit, with sharded states and most recompute."""
        choices = _each(self._choices.take(members), _reported)
        variants = _Variants.of(self._cells, members, choices)
        if not len(variants.table):
            return ()
        nearest = np.argsort(sum(needed_nbytes(variants.table)), kind="stable")[:NUM_LACKING]
        layouts = map(variants.table.config, nearest.tolist())
        return tuple(one for one in layouts if one != self._excluded)

    def _round(self, members: Ints) -> None:
        """Time the variants of some cells that fit and may be among the best."""
        variants = _Variants.of(self._cells, members, self._choices.take(members))
        fits = self._budget.holds(*needed_nbytes(variants.table))
        self._over_memory += int((~fits).sum())
        variants = variants.take(np.flatnonzero(variants.lightest(fits)))
        rough_s = rough_times(variants.table, self._steps)
        order = np.argsort(rough_s, kind="stable")
        rows = variants.table.coded(_row, _ROW)
        while len(order := order[rough_s[order] < self._row_limits(rows)[rows.codes[order]]]):
            some, order = order[:_VARIANTS], order[_VARIANTS:]
            self._evaluated += len(some)
            self._take(variants.table.take(some), variants.order[some])

    def _row_limits(self, rows: Column[Hashable]) -> Floats:
        """Return the step time from which a layout is not the best of each row, or not among the
        best, shape (rows,)."""
        known = (self._best[row][1].time_s if row in self._best else np.inf for row in rows.values)
        return np.minimum([*known], self._limit_s)

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
        ranked = [one for _, one in sorted(self._best.values(), key=lambda pair: pair[0])]
        return [one for one in ranked if one.config != self._excluded][: self._effort.top]

    def _take(self, table: LayoutTable, order: Ints) -> None:
        """Time layouts and enter those that are the fastest of their row so far."""
        if not len(table):
            return
        times_s = self._steps.median_times(table)
        keys = np.round(np.log(times_s), _DECIMALS)
        for row in np.lexsort((order, keys)).tolist():
            if times_s[row] > self._limit_s:
                return
            config = table.config(row)
            key, name = (float(keys[row]), int(order[row])), _row(config)
            if name not in self._best or key < self._best[name][0]:
                self._best[name] = key, Ranked(config=config, time_s=float(times_s[row]))


_ORDERS = 10**6
"""More than the variants of any cell."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Variants:
    """Variants of cells: all combinations of their states and recompute."""

    table: LayoutTable
    cells: Ints
    """Cell of each variant."""
    order: Ints
    """Tie-breaker of equal times; the lower comes first."""
    choices: tuple[Choices, ...] = ()
    """Those of consecutive cells: variants are in the order of cells, states and recompute."""

    @staticmethod
    def of(cells: Cells, members: Ints, choices: Column[Choices]) -> _Variants:
        """Return all variants of the cells ``members`` with their ``Choices``."""
        states = list(dict.fromkeys(s for one in choices.values for s in one.states))
        options = list(dict.fromkeys(r for one in choices.values for r in one.recomputes))
        parts, of_cells = [np.empty((4, 0), dtype=np.int64)], []
        for places in groups(choices.codes):
            one = choices.value(int(places[0]))
            each = [
                (states.index(s), options.index(r), i + 1000 * k)
                for i, s in enumerate(one.states)
                for k, r in enumerate(one.recomputes)
            ]
            of_each = np.tile(np.array(each, dtype=np.int64).reshape(-1, 3).T, len(places))
            parts.append(np.vstack([np.repeat(members[places], len(each)), of_each]))
            of_cells += [one] * len(places)
        cell, state, option, order = np.concatenate(parts, axis=1)
        table = _with_states(cells.table.take(cell), states, state)
        return _Variants(
            table=_with_options(table, options, option),
            cells=cell,
            order=cell * _ORDERS + order,
            choices=tuple(of_cells),
        )

    def lightest(self, fits: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return True for variants that fit while none does that recomputes a part of the same, in
        the same cell and states: more recompute takes at least as long."""
        out, begin = np.zeros_like(fits), 0
        for one, cells in groupby(self.choices):
            end = begin + len(one) * len([*cells])
            of_states = fits[begin:end].reshape(-1, max(1, len(one.recomputes)))
            out[begin:end] = (of_states & (of_states @ _heavier(one.recomputes) == 0)).ravel()
            begin = end
        return out

    def take(self, rows: Ints) -> _Variants:
        """Return some variants, by index."""
        return _Variants(
            table=self.table.take(rows), cells=self.cells[rows], order=self.order[rows]
        )


@cache
def _heavier(options: tuple[RecomputeOption, ...]) -> Ints:
    """Return 1 where an option (column) recomputes more than another (row), shape (options,
    options)."""
    rows = [
        [one != other and (one == RecomputeOption() or one.is_within(other)) for other in options]
        for one in options
    ]
    return np.array(rows, dtype=np.int64).reshape(len(options), len(options))


def _with_states(table: LayoutTable, states: list[States], codes: Ints) -> LayoutTable:
    """Return layouts with ``states[codes]``, which change some fields of some layouts."""
    changes = [{**dict(one.changes), "optimizer_offload_frac": one.offload_frac} for one in states]
    columns = dict(table.columns)
    for name in dict.fromkeys(name for one in changes for name in one):
        old = table.column(name)
        values = (*old.values, *(one.get(name) for one in changes))
        is_changed = np.array([name in one for one in changes])[codes]
        new = np.where(is_changed, len(old.values) + codes, old.codes)
        columns[name] = Column(values=values, codes=new).merged()
    return replace(table, columns=columns)


def _with_options(table: LayoutTable, options: list[RecomputeOption], codes: Ints) -> LayoutTable:
    """Return layouts with the recompute ``options[codes]``."""
    base = [one.applied_to(table.base) for one in options]
    names = (
        "recompute",
        "recompute_modules",
        "recompute_num_layers",
        "distributes_saved_activations",
    )
    columns = {
        name: Column(values=tuple(getattr(one, name) for one in base), codes=codes).merged()
        for name in names
    }
    return replace(table, columns={**table.columns, **columns})


def _each(choices: Column[Choices], some: Callable[[Choices], Choices]) -> Column[Choices]:
    """Return the choices of each cell that ``some`` picks of them."""
    return Column(values=tuple(some(one) for one in choices.values), codes=choices.codes)


def _most_recomputed(choices: Choices) -> Choices:
    """Return the choice with most layers recomputed and the least states."""
    whole = [one for one in choices.recomputes if one.recompute is Recompute.FULL]
    return _with_least_states(choices, whole[-1:])


def _all_modules(choices: Choices) -> Choices:
    selective = [one for one in choices.recomputes if one.recompute is Recompute.SELECTIVE]
    return _with_least_states(choices, sorted(selective, key=lambda one: one.weight)[-1:])


def _none_recomputed(choices: Choices) -> Choices:
    return _with_least_states(choices, choices.recomputes[:1])


def _with_least_states(choices: Choices, options: Sequence[RecomputeOption]) -> Choices:
    states = max(choices.states, key=_spread, default=None)
    return Choices(states=() if states is None else (states,), recomputes=tuple(options))


def _spread(states: States) -> tuple[bool, float, int]:
    """Return a sort key of states: the higher, the less memory of a device they take."""
    fields = dict(states.changes)
    is_spread = fields.get("is_optimizer_distributed", True)
    return is_spread, states.offload_frac, -fields.get("num_optimizer_instances", 0)


def _reported(choices: Choices) -> Choices:
    """Return the choice with low memory that is reported: with nothing on the host."""
    on_device = tuple(one for one in choices.states if not one.offload_frac)
    return _with_least_states(replace(choices, states=on_device), choices.recomputes[-1:])


_ROW = (
    *("tp", "cp", "ep", "etp", "pp", "vp", "dp", "micro_batch_size"),
    *("is_optimizer_distributed", "sharding"),
)


def _row(config: RunConfig) -> Hashable:
    """Return the key of a row: degrees, micro-batch and sharding."""
    par = config.parallelism
    degrees = (par.tp, par.cp, par.ep, par.expert_tp, par.pp, par.vp, par.dp)
    return (*degrees, config.batch.micro_batch_size, par.sharded)


def _is_alike(config: RunConfig, running: RunConfig, num_ranks: int) -> bool:
    """Return True if a known layout does the same work on ``num_ranks`` ranks."""
    size = (config.batch.global_batch_size, config.device, config.precision, config.fp8)
    wanted = (running.batch.global_batch_size, running.device, running.precision, running.fp8)
    same = same_layout(running).model == same_layout(config).model
    return size == wanted and same and config.parallelism.num_ranks == num_ranks


def _written_as(config: RunConfig, running: RunConfig) -> RunConfig:
    """Return a known layout, with fields that are not part of a layout from the running one."""
    per_node = running.parallelism.ranks_per_node
    return replace(
        config,
        model=running.model,
        parallelism=replace(config.parallelism, ranks_per_node=per_node),
        cadence=running.cadence,
        unmodelled=running.unmodelled,
    )
