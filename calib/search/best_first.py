"""The best layouts, proven: exact evaluation of what can still be among them, best bound first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from ..arguments.keep import Keep
from ..steps.model import FittedSteps
from ..workload.config import RunConfig
from .asked import num_variants
from .cells import Cells, Ints, cells_of
from .found import NUM_LACKING, Effort, Floats, Found, Lacking, Proof, Ranked, Room, Tally
from .halves import SMALL, HalvedBounds, over_halves
from .least_memory import least_nbytes, overheads
from .recomputes import recomputes
from .space import num_nodes, states
from .variants import Outcome, Study, rounded_log

_ROUND = 128
"""Cells of a round: enough for arrays to pay, few enough that the limit falls soon."""
_MOST_LACKING = 200
"""Cells that are looked through for layouts to tell of that do not fit."""
_FRONT_FRAC, _EACH = 0.2, 10
"""Of all cells by their bounds without experts, the part that is looked into first, and every
which of it: with their experts these soon give a limit that few other cells are below."""
_ALIKE_FRAC = 2e-9
"""Of the step time: what rounding leaves of it."""


def best_layouts(
    config: RunConfig,
    steps: FittedSteps,
    num_ranks: int,
    *,
    room: Room | None = None,
    keep: Keep | None = None,
    effort: Effort | None = None,
) -> Found:
    """The best layouts of a run on so many ranks, no two alike in degrees, micro-batch and
    sharding, and none where the running layout is the best of its kind.

    Where the search is stopped, the best so far, and ``gap_frac`` says how far from proven.
    """
    search = _Search(config, steps, num_ranks, room or Room(), keep or Keep(), effort or Effort())
    search.search()
    return search.found()


class _Search:
    def __init__(
        self,
        config: RunConfig,
        steps: FittedSteps,
        num_ranks: int,
        room: Room,
        keep: Keep,
        effort: Effort,
    ) -> None:
        self._steps, self._room, self._keep, self._effort = steps, room, keep, effort
        self._own = config
        self._cells = cells_of(config, num_ranks, keep)
        self._best: list[Ranked] = []
        self._lacking: list[Lacking] = []
        self._tally = Tally()
        self._gap_frac = 0.0

    def search(self) -> None:
        """Bounds of all cells, and those evaluated that may be among the best."""
        able = self._fitting()
        bounds = HalvedBounds(able, self._steps)
        with self._effort.pool(bounds.of) as mapped:
            self._effort.told("bounds", 0.0)
            self._least_s = bounds.bare(mapped)
            self._study = Study(cells=able, steps=self._steps, room=self._room, keep=self._keep)
            self._evaluate(lambda members: bounds.whole(members, mapped))

    def _fitting(self) -> Cells:
        """Cells of which something may fit."""
        cells, told = self._cells, self._effort.told
        told("memory", 0.0)
        overhead = overheads(cells)
        least = over_halves(cells, least_nbytes, self._effort.pool)
        is_able = np.asarray(self._room.holds(least, overhead))
        over = np.flatnonzero(~is_able)
        nearest = over[np.argsort((least + overhead)[over], kind="stable")[:_MOST_LACKING]]
        for place in nearest.tolist():
            if len(self._lacking) == NUM_LACKING:
                break
            layout = _least_that_is_kept(cells.layout(place), self._keep)
            if layout is not None:
                nbytes = float(least[place] + overhead[place])
                self._lacking.append(Lacking(config=layout, needed_nbytes=nbytes))
        self._tally.over_memory += num_variants(cells.subset(over))
        return cells.subset(np.flatnonzero(is_able))

    def _evaluate(self, whole: Callable[[Ints], Floats]) -> None:
        """Rounds of cells until no bound is below the limit; ``whole`` bounds them with experts."""
        cells = self._study.cells
        self._is_left = np.ones(len(cells), dtype=bool)
        shape = (cells.columns["pp"], cells.columns["vp"], cells.num_microbatches)
        self._shapes = cells.distinct(*shape)[1]
        self._take(self._study.measured(self._own, self._cells.num_ranks))
        has_experts = cells.config.model.experts is not None
        with self._effort.pool(self._study.examine) as mapped:
            front = np.empty(0, dtype=np.int64)
            if has_experts and len(cells) > SMALL:
                number = int(_FRONT_FRAC * len(cells))
                front = np.sort(np.argsort(self._least_s, kind="stable")[:number:_EACH])
                self._least_s[front] = whole(front)
                self._rounds(front[np.argsort(self._least_s[front])][:_ROUND], mapped)
            if has_experts and not self._effort.is_stopped():
                is_open = self._is_left & (self._least_s < self._limit_s)
                is_open[front] = False
                rest = np.flatnonzero(is_open)
                self._least_s[rest] = whole(rest)
            left = np.flatnonzero(self._is_left)
            self._rounds(left[np.argsort(self._least_s[left], kind="stable")], mapped)
        self._tally.bounded += num_variants(cells.subset(np.flatnonzero(self._is_left)))

    def _rounds(
        self, order: Ints, mapped: Callable[[Sequence[tuple[Ints, float]]], Sequence[Outcome]]
    ) -> None:
        """Evaluates cells in this order as long as their bounds are below the limit."""
        least_s = self._least_s
        for begin in range(0, len(order), _ROUND):
            limit_s = self._limit_s
            members = order[begin : begin + _ROUND]
            members = members[least_s[members] < limit_s]
            if not len(members):
                return
            if self._effort.is_stopped():
                best_s = self._others[0].time_s if self._others else np.inf
                left_s = float(least_s[self._is_left].min())
                self._gap_frac = max(0.0, 1.0 - left_s / best_s)
                return
            for outcome in mapped([(part, limit_s) for part in self._halves_of(members)]):
                self._take(outcome)
            self._is_left[members] = False
            left = int((least_s[self._is_left] < self._limit_s).sum())
            self._effort.told("layouts", begin / max(begin + left, 1))

    def _halves_of(self, members: Ints) -> list[Ints]:
        """Cells of a round by the shape of their pipeline, which is built once in each process."""
        if len(self._shapes) <= SMALL:
            return [members]
        parts = [members[self._shapes[members] % 2 == rest] for rest in (0, 1)]
        return [part for part in parts if len(part)]

    @property
    def _limit_s(self) -> float:
        """Layouts from here on are not among the best."""
        others = self._others
        if len(others) < self._effort.top:
            return np.inf
        return others[-1].time_s * (1 + _ALIKE_FRAC)

    @property
    def _others(self) -> list[Ranked]:
        """The best so far but the layout that runs, which may stand first in its row."""
        return [one for one in self._best if one.config != self._own][: self._effort.top]

    def _take(self, outcome: Outcome) -> None:
        self._tally.add(outcome.tally)
        self._lacking += outcome.lacking
        found: dict[Hashable, Ranked] = {}
        for one in sorted((*self._best, *outcome.best), key=_rank):
            found.setdefault(_row(one.config), one)
        self._best = list(found.values())[: self._effort.top + 1]

    def found(self) -> Found:
        """The answer."""
        lacking = sorted(self._lacking, key=lambda one: one.needed_nbytes)[:NUM_LACKING]
        return Found(
            best=tuple(self._others),
            lacking=tuple(one.config for one in lacking if one.config != self._own),
            proof=Proof(
                num_cells=len(self._cells),
                tally=self._tally,
                cut=self._cells.cut,
                gap_frac=self._gap_frac,
            ),
        )


def _least_that_is_kept(layout: RunConfig, keep: Keep) -> RunConfig | None:
    """A variant that needs little of what is asked for: states spread, and most computed again."""
    for choice in reversed(states(layout, num_nodes(layout))):
        for again in reversed(recomputes(layout)):
            variant = again.of(choice.of(layout))
            if not variant.optimizer_offload_frac and keep.allows(variant):
                return variant
    return None


def _rank(one: Ranked) -> tuple[float, int]:
    return rounded_log(one.time_s), one.order


def _row(config: RunConfig) -> Hashable:
    """What makes a layout a row of its own: degrees, micro-batch and what is sharded."""
    par = config.parallelism
    degrees = (par.tp, par.cp, par.ep, par.expert_tp, par.pp, par.vp, par.dp)
    return (*degrees, config.batch.micro_batch_size, par.sharded)
