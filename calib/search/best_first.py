"""The best layouts, proven: exact evaluation of what can still be among them, best bound first."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from ..arguments.keep import Keep
from ..steps.model import FittedSteps
from ..workload.config import RunConfig
from .asked import num_variants
from .cells import Cells, Ints, cells_of
from .found import NUM_LACKING, Effort, Found, Lacking, Proof, Ranked, Room, Tally
from .least_memory import least_nbytes, overheads
from .least_time import TimeBounds
from .recomputes import recomputes
from .space import num_nodes, states
from .variants import Outcome, Study, rounded_log

_ROUND = 128
"""Cells of a round: enough for arrays to pay, few enough that the limit falls soon."""
_SMALL = 1000
"""Cells whose experts are all priced at once."""
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
        self._effort.told("bounds", 0.0)
        self._bounds = TimeBounds(able, self._steps)
        self._least_s = self._bounds.bare()
        self._study = Study(cells=able, steps=self._steps, room=self._room, keep=self._keep)
        self._evaluate()

    def _fitting(self) -> Cells:
        """Cells of which something may fit."""
        cells = self._cells
        self._effort.told("memory", 0.0)
        least, overhead = least_nbytes(cells), overheads(cells)
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

    def _evaluate(self) -> None:
        """Rounds of cells until no bound is below the limit."""
        cells = self._study.cells
        self._is_open = np.ones(len(cells), dtype=bool)
        self._take(self._study.measured(self._own, self._cells.num_ranks))
        if cells.config.model.experts is not None:
            self._price_experts()
        self._rounds(self._in_order(np.flatnonzero(self._is_open)))
        self._tally.bounded += num_variants(cells.subset(np.flatnonzero(self._is_open)))

    def _price_experts(self) -> None:
        """Bounds with experts of the cells whose others do not say enough."""
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
        """The lowest bound first."""
        return members[np.argsort(self._least_s[members], kind="stable")]

    def _rounds(self, order: Ints) -> None:
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
                unseen_s = float(least_s[self._is_open].min())
                self._gap_frac = max(0.0, 1.0 - unseen_s / best_s)
                return
            self._take(self._study.examine(members, limit_s))
            self._is_open[members] = False
            remaining = int((least_s[self._is_open] < self._limit_s).sum())
            self._effort.told("layouts", begin / max(begin + remaining, 1))

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
