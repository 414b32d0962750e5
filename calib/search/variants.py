"""Exact evaluation of the variants of cells: all combinations of states and recompute."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..arguments import LayoutConstraint
from ..layers import RecomputeOption
from ..memory import needed_nbytes
from ..steps import FittedSteps, same_layout
from ..workload import Column, LayoutTable, RunConfig, Sharding
from .cells import Cells, Ints
from .results import Lacking, MemoryBudget, Ranked, Tally
from .space import lightest, num_nodes, recomputes, states

_DECIMALS = 9
"""Decimals of a log step time; layouts that agree in these tie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of evaluating some cells."""

    best: tuple[Ranked, ...]
    lacking: tuple[Lacking, ...] = ()
    tally: Tally


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Study:
    """Exact evaluation of the variants of cells."""

    cells: Cells
    steps: FittedSteps
    budget: MemoryBudget
    keep: LayoutConstraint

    def examine(self, members: Ints, limit_s: float) -> Outcome:
        """Return the best variants of cells, by index, that may be below a limit in seconds."""
        variants = [_Variants(self, place) for place in members.tolist()]
        self._fit([one for cell in variants for one in cell.lightest()])
        self._fit([one for cell in variants for one in cell.heavier()])
        self._bound([pair for one in variants for pair in one.passes()])
        self._time([one.likeliest(limit_s) for one in variants])
        self._time([one.rest(limit_s) for one in variants])
        tally = Tally()
        for one in variants:
            tally.add(one.tally)
        return Outcome(
            best=tuple(ranked for one in variants for ranked in one.best()),
            lacking=tuple(ranked for one in variants for ranked in one.lacking()),
            tally=tally,
        )

    def measured(self, running: RunConfig, num_ranks: int) -> Outcome:
        """Return layouts with measured steps, for which no bound of the model is valid."""
        known = dict.fromkeys(one.config for one in self.steps.known if not one.site)
        alike = [
            _written_as(config, running)
            for config in known
            if _is_alike(config, running, num_ranks) and self.keep.allows(config)
        ]
        if not alike:
            return Outcome(best=(), tally=Tally())
        holds = self.budget.holds(*needed_nbytes(LayoutTable.of(alike))).tolist()
        times_s = self.steps.median_times(alike).tolist()
        best = tuple(
            Ranked(config=config, time_s=time_s, order=len(self.cells))
            for config, time_s, fits in zip(alike, times_s, holds, strict=True)
            if fits
        )
        return Outcome(best=best, tally=Tally())

    def _fit(self, requests: Sequence[tuple[_StateGroup, tuple[RecomputeOption, ...]]]) -> None:
        """Determine whether states fit in memory with each recompute option."""
        if not requests:
            return
        allocated, overhead = needed_nbytes(_table(requests))
        holds = iter(self.budget.holds(allocated, overhead).tolist())
        needed = iter((allocated + overhead).tolist())
        for group, agains in requests:
            for recompute in agains:
                group.fits[recompute], group.needs[recompute] = next(holds), next(needed)

    def _bound(self, pairs: Sequence[tuple[_Variants, RecomputeOption]]) -> None:
        """Set lower bounds of step times for cells with recompute options, over all states."""
        least_s = self.steps.least_times(
            [recompute.applied_to(one.layout) for one, recompute in pairs]
        )
        for (one, recompute), bound_s in zip(pairs, least_s.tolist(), strict=True):
            one.least_s[recompute] = bound_s

    def _time(self, batches: Sequence[Sequence[_Variant]]) -> None:
        """Set exact median step times of all variants in one call."""
        flat = [one for batch in batches for one in batch]
        if not flat:
            return
        times_s = self.steps.median_times([one.config for one in flat])
        for one, time_s in zip(flat, times_s.tolist(), strict=True):
            one.time_s = time_s


@dataclass(slots=True, eq=False)
class _StateGroup:
    """States that take the same memory."""

    config: RunConfig
    fits: dict[RecomputeOption, bool] = field(default_factory=dict)
    needs: dict[RecomputeOption, float] = field(default_factory=dict)
    """Bytes needed with each evaluated recompute option."""


@dataclass(slots=True, eq=False)
class _State:
    """One choice of states, without recompute."""

    config: RunConfig
    order: int
    group: _StateGroup
    light: list[RecomputeOption] = field(default_factory=list)
    """Lightest recompute options that fit."""


@dataclass(slots=True, eq=False)
class _Variant:
    config: RunConfig
    order: int
    time_s: float = np.inf


class _Variants:
    """The variants of one cell: all combinations of states and recompute."""

    def __init__(self, study: Study, place: int) -> None:
        self._study, self._place, self._keep = study, place, study.keep
        self.tally = Tally()
        self.least_s: dict[RecomputeOption, float] = {}
        self.layout = study.cells.layout(place)
        self._recompute_options = recomputes(self.layout)
        self._timed: list[_Variant] = []
        self._states = self._with_states()
        self._open = list(dict.fromkeys(one.group for one in self._states))

    def _with_states(self) -> list[_State]:
        groups: dict[Hashable, _StateGroup] = {}
        result = []
        for number, choice in enumerate(states(self.layout, num_nodes(self.layout))):
            config = choice.of(self.layout)
            par = config.parallelism
            alike = (par.sharded, par.num_optimizer_instances, choice.offload_frac)
            group = groups.setdefault(alike, _StateGroup(config=config))
            result.append(_State(config=config, order=number, group=group))
        return result

    def lightest(self) -> list[tuple[_StateGroup, tuple[RecomputeOption, ...]]]:
        """Return the first memory requests: each group with the lightest recompute."""
        return [(group, self._recompute_options[:1]) for group in self._open]

    def heavier(self) -> list[tuple[_StateGroup, tuple[RecomputeOption, ...]]]:
        """Return further memory requests, if the lightest does not fit or is not allowed."""
        lightest = self._recompute_options[0]
        return [
            (group, self._recompute_options)
            for group in self._open
            if not (group.fits[lightest] and self._is_requested(group, lightest))
        ]

    def passes(self) -> list[tuple[_Variants, RecomputeOption]]:
        """Return the lightest recompute options that fit with any states.

        More recompute of the same kind takes at least as long.
        """
        for state in self._states:
            known = state.group.fits
            fitting = [recompute for recompute, fits in known.items() if fits]
            allowed = [recompute for recompute in fitting if self._is_requested(state, recompute)]
            state.light = lightest(allowed)
            self.tally.over_memory += len(known) - len(fitting)
            self.tally.not_asked += len(fitting) - len(allowed)
            num_dominated = (
                len(self._recompute_options) - len(known) + len(allowed) - len(state.light)
            )
            self.tally.dominated += num_dominated
        candidates = dict.fromkeys(recompute for state in self._states for recompute in state.light)
        return [(self, recompute) for recompute in candidates]

    def likeliest(self, limit_s: float) -> list[_Variant]:
        """Return the variant with the lowest bound of each choice of states, if below the limit."""
        chosen = []
        for state in self._states:
            recompute = min(state.light, key=self.least_s.__getitem__, default=None)
            if recompute is not None and self.least_s[recompute] < limit_s:
                state.light.remove(recompute)
                chosen.append(self._variant(state, recompute))
        return chosen

    def rest(self, limit_s: float) -> list[_Variant]:
        """Return other variants that may be the best of their row and among the best overall."""
        row_s: dict[Sharding, float] = {}
        for one in self._timed:
            sharded = one.config.parallelism.sharded
            row_s[sharded] = min(row_s.get(sharded, limit_s), one.time_s)
        chosen = []
        for state in self._states:
            below_s = row_s.get(state.config.parallelism.sharded, limit_s)
            able = [recompute for recompute in state.light if self.least_s[recompute] < below_s]
            self.tally.bounded += len(state.light) - len(able)
            chosen += [self._variant(state, recompute) for recompute in able]
        return chosen

    def _is_requested(self, one: _State | _StateGroup, recompute: RecomputeOption) -> bool:
        return not self._keep.axes or self._keep.allows(recompute.applied_to(one.config))

    def _variant(self, state: _State, recompute: RecomputeOption) -> _Variant:
        order = state.order + 1000 * self._recompute_options.index(recompute)
        variant = _Variant(config=recompute.applied_to(state.config), order=order)
        self._timed.append(variant)
        self.tally.evaluated += 1
        return variant

    def best(self) -> list[Ranked]:
        """Return the fastest timed variant of each sharding."""
        order = int(self._study.cells.columns["number"][self._place])
        by_sharding: dict[Sharding, Ranked] = {}
        for one in sorted(self._timed, key=lambda one: (rounded_log(one.time_s), one.order)):
            ranked = Ranked(config=one.config, time_s=one.time_s, order=order)
            by_sharding.setdefault(one.config.parallelism.sharded, ranked)
        return list(by_sharding.values())

    def lacking(self) -> list[Lacking]:
        """Return the variant with least memory if none fits."""
        if any(fits for group in self._open for fits in group.fits.values()):
            return []
        needs = [
            (nbytes, group, recompute)
            for group in self._open
            for recompute, nbytes in group.needs.items()
        ]
        for nbytes, group, recompute in sorted(needs, key=lambda one: one[0]):
            config = recompute.applied_to(group.config)
            if self._keep.allows(config):
                return [Lacking(config=config, needed_nbytes=nbytes)]
        return []


def _table(requests: Sequence[tuple[_StateGroup, tuple[RecomputeOption, ...]]]) -> LayoutTable:
    """Return the layouts of all requests, each with each of its recompute options."""
    groups = LayoutTable.of([group.config for group, _ in requests])
    rows = np.repeat(np.arange(len(groups)), [len(agains) for _, agains in requests])
    table = groups.take(rows)
    options: dict[RecomputeOption, int] = {}
    codes = [options.setdefault(one, len(options)) for _, agains in requests for one in agains]
    names = {
        "recompute": "recompute",
        "recompute_modules": "modules",
        "recompute_num_layers": "num_layers",
    }
    columns = {
        name: Column(
            values=tuple(getattr(option, own) for option in options),
            codes=np.array(codes, dtype=np.int64),
        )
        for name, own in names.items()
    }
    return replace(table, columns={**table.columns, **columns})


def rounded_log(time_s: float) -> float:
    """Return the sort key of layouts: rounded, so that ties do not depend on the last digits."""
    return round(float(np.log(time_s)), _DECIMALS)


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
