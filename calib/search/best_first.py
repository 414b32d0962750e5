"""The best layouts, proven: exact evaluation of what can still be among them, best bound first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ..arguments.keep import Keep
from ..errors import ConfigError
from ..memory.layout_table import needed_nbytes
from ..memory.peak import RESERVE_FRAC
from ..steps.known import same_layout
from ..steps.model import FittedSteps
from ..workload.collectives import Collective, GroupRole
from ..workload.config import Recompute, RunConfig
from ..workload.ranks import group_call
from .cells import Cells, Ints, cells_of
from .least_memory import least_nbytes, overheads
from .least_time import RECOMPUTES, LeastTimes, least_times
from .space import Again, recomputes, states

TOP = 20
"""Layouts that are proven to be the best where nobody asks for another number."""
_ROUND = 64
"""Cells of a round: enough for arrays to pay, few enough that the limit falls soon."""
_DECIMALS = 9
"""Of the log of a step time: closer layouts take the same time."""
Run = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""``map``, or one that uses several processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory of a device, and what its measured peak had beyond the estimate."""

    capacity_nbytes: int | None = None
    offset_nbytes: int = 0

    def holds(self, allocated_nbytes: Any, overhead_nbytes: Any) -> Any:
        """Whether layouts are likelier to fit than not; the rule of ``fit_probability``."""
        if self.capacity_nbytes is None:
            return np.ones(np.shape(allocated_nbytes), dtype=bool)
        allocated = (1 + RESERVE_FRAC) * (allocated_nbytes + self.offset_nbytes)
        return allocated + overhead_nbytes <= self.capacity_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """The best variant of one cell."""

    config: RunConfig
    time_s: float
    """Median step time."""
    order: int
    """Of two that take the same time the lower comes first."""


@dataclass(slots=True)
class Tally:
    """What became of the layouts of a space; each is in one of the four."""

    over_memory: int = 0
    bounded: int = 0
    """A bound says that they are not among the best."""
    dominated: int = 0
    """Another one of their cell computes less again, and fits."""
    evaluated: int = 0

    def add(self, other: Tally) -> None:
        """The sums of both."""
        for name in Tally.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def num_layouts(self) -> int:
        """All of them."""
        return self.over_memory + self.bounded + self.dominated + self.evaluated


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How far the answer is proven."""

    num_cells: int
    tally: Tally
    cut: dict[str, int] = field(default_factory=dict)
    """Combinations that each of Megatron's rules left out."""
    gap_frac: float = 0.0
    """How much faster than the best found an unseen layout might be; 0 where it is proven."""

    @property
    def is_proven(self) -> bool:
        """True where no layout that was not evaluated can be among the best."""
        return self.gap_frac == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best layouts, fastest first, those that lack least memory, and the proof."""

    best: tuple[Ranked, ...]
    lacking: tuple[RunConfig, ...]
    """Layouts that do not fit, least lacking first."""
    proof: Proof


def best_layouts(
    config: RunConfig,
    steps: FittedSteps,
    num_ranks: int,
    *,
    room: Room | None = None,
    keep: Keep | None = None,
    top: int = TOP,
    run: Run = map,
    is_stopped: Callable[[], bool] = lambda: False,
    told: Callable[[float], None] = lambda frac: None,
) -> Found:
    """The best layouts of a run on so many ranks, no two alike in degrees and micro-batch.

    ``is_stopped`` is asked between rounds: then the answer is the best so far, and ``gap_frac``
    says how far from proven.  ``told`` hears which share of the bounds is behind.  ``run`` maps
    rounds of work over processes; the answer does not depend on it.
    """
    search = _Search(config, steps, num_ranks, room or Room(), keep or Keep(), top)
    search.bound(run)
    search.evaluate(run, is_stopped, told)
    return search.found()


class _Search:
    def __init__(
        self,
        config: RunConfig,
        steps: FittedSteps,
        num_ranks: int,
        room: Room,
        keep: Keep,
        top: int,
    ) -> None:
        self._steps, self._room, self._keep, self._top = steps, room, keep, top
        self._own = same_layout(config)
        self._cells = cells_of(config, num_ranks, keep)
        self._best: list[Ranked] = []
        self._tally = Tally()
        self._gap_frac = 0.0

    def bound(self, run: Run) -> None:
        """Least memory and time of all cells."""
        cells = self._cells
        least, overhead = least_nbytes(cells), overheads(cells)
        is_able = np.asarray(self._room.holds(least, overhead))
        self._over = np.flatnonzero(~is_able)
        self._lack = (least + overhead)[self._over]
        self._able = cells.subset(np.flatnonzero(is_able))
        self._least = least_times(self._able, self._steps)
        # Cells of layouts whose steps are known come first: they are what was measured.
        known = {same_layout(one.config).parallelism for one in self._steps.known}
        self._order = np.argsort(self._least.time_s, kind="stable")
        self._known = known

    def evaluate(
        self, run: Run, is_stopped: Callable[[], bool], told: Callable[[float], None]
    ) -> None:
        """Rounds of cells until no bound is below the limit."""
        begin = 0
        while begin < len(self._order):
            limit_s = self._limit_s
            members = self._order[begin : begin + _ROUND]
            members = members[self._least.time_s[members] < limit_s]
            if not len(members):
                break
            if is_stopped():
                least_s = float(self._least.time_s[members[0]])
                best_s = self._best[0].time_s if self._best else np.inf
                self._gap_frac = max(0.0, 1.0 - least_s / best_s)
                break
            for outcome in run(self._study(limit_s), np.array_split(members, 2)):
                self._take(outcome)
            begin += len(members)
            told(begin / max(1, int((self._least.time_s < self._limit_s).sum())))
        self._rest(begin)

    def _study(self, limit_s: float) -> Callable[[Ints], Outcome]:
        study = Study(cells=self._able, least=self._least, steps=self._steps, room=self._room)
        return partial(study.examine, limit_s=limit_s, keep=self._keep)

    def _rest(self, begin: int) -> None:
        """Counts of the variants of cells that nobody had to look at."""
        self._tally.bounded += num_variants(self._able, self._order[begin:])
        self._tally.over_memory += num_variants(self._cells, self._over)

    @property
    def _limit_s(self) -> float:
        return self._best[self._top - 1].time_s if len(self._best) >= self._top else np.inf

    def _take(self, outcome: Outcome) -> None:
        self._tally.add(outcome.tally)
        found: dict[tuple[int, ...], Ranked] = {}
        for one in sorted((*self._best, *outcome.best), key=_rank):
            if same_layout(one.config) != self._own:
                found.setdefault(_row(one.config), one)
        self._best = list(found.values())[: self._top]

    def found(self) -> Found:
        """The answer."""
        return Found(
            best=tuple(self._best),
            lacking=tuple(self._lacking()),
            proof=Proof(
                num_cells=len(self._cells),
                tally=self._tally,
                cut=dict(self._cells.cut),
                gap_frac=self._gap_frac,
            ),
        )

    def _lacking(self) -> Iterator[RunConfig]:
        for place in self._over[np.argsort(self._lack, kind="stable")[: self._top]]:
            layout = self._cells.layout(int(place))
            yield replace(layout, recompute=Recompute.FULL)


def _rank(one: Ranked) -> tuple[float, int]:
    return _rounded_log(one.time_s), one.order


def _row(config: RunConfig) -> tuple[object, ...]:
    """What makes a layout a row of its own: degrees and micro-batch, and whether weights or
    gradients are sharded."""
    par = config.parallelism
    degrees = (par.tp, par.cp, par.ep, par.expert_tp, par.pp, par.vp, par.dp)
    return (*degrees, config.batch.micro_batch_size, par.shards_weights, par.shards_grads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of some cells."""

    best: tuple[Ranked, ...]
    tally: Tally


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Study:
    """Exact evaluation of the variants of cells."""

    cells: Cells
    least: LeastTimes
    steps: FittedSteps
    room: Room

    def examine(self, members: Ints, *, limit_s: float, keep: Keep) -> Outcome:
        """The best variant of each of the cells that may come below the limit."""
        variants = [_Variants(self, int(place), keep) for place in members]
        self._time([one.plain for one in variants])
        for one in variants:
            one.keep_open(limit_s)
        self._fit([pair for one in variants for pair in one.lightest()])
        self._fit([pair for one in variants for pair in one.heavier()])
        for one in variants:
            one.choose(limit_s)
        self._time([one.chosen for one in variants])
        tally = Tally()
        for one in variants:
            tally.add(one.tally)
        best = [found for one in variants if (found := one.best()) is not None]
        return Outcome(best=tuple(best), tally=tally)

    def _fit(self, asked: Sequence[tuple[_Kept, Again]]) -> None:
        """Whether ways to keep states fit with what is computed again."""
        if not asked:
            return
        allocated, overhead = needed_nbytes([again.of(kept.config) for kept, again in asked])
        holds = self.room.holds(allocated, overhead)
        for (kept, again), is_fitting in zip(asked, holds.tolist(), strict=True):
            kept.fits[again] = is_fitting

    def _time(self, batches: Sequence[Sequence[_Variant]]) -> None:
        """Exact medians of all, at once."""
        flat = [one for batch in batches for one in batch]
        if not flat:
            return
        times_s = self.steps.median_times([one.config for one in flat])
        for one, time_s in zip(flat, times_s.tolist(), strict=True):
            one.time_s = time_s


@dataclass(slots=True, eq=False)
class _Kept:
    """Ways to keep states that take the same memory."""

    config: RunConfig
    fits: dict[Again, bool] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Variant:
    config: RunConfig
    order: int
    kept: _Kept
    time_s: float = np.inf


class _Variants:
    """The variants of one cell: how states are kept, times what is computed again."""

    def __init__(self, study: Study, place: int, keep: Keep) -> None:
        self._study, self._place, self._keep = study, place, keep
        self.tally = Tally()
        self.chosen: list[_Variant] = []
        self._layout = study.cells.layout(place)
        self._agains = recomputes(self._layout, min(self._layout.chunk_layers))
        levels = study.least.levels[place]
        ratios = np.exp(levels - levels[RECOMPUTES.index(Recompute.NONE)]).tolist()
        self._ratios = dict(zip(RECOMPUTES, ratios, strict=True))
        self.plain = self._with_states()

    def _with_states(self) -> list[_Variant]:
        """Each way to keep states, with nothing computed again."""
        kept: dict[Any, _Kept] = {}
        found = []
        for number, choice in enumerate(states(self._layout, _num_nodes(self._layout))):
            try:
                config = choice.of(self._layout)
            except ConfigError:
                continue
            par = config.parallelism
            alike = (par.sharded, par.num_optimizer_instances, choice.offload_frac)
            held = kept.setdefault(alike, _Kept(config=config))
            found.append(_Variant(config=config, order=number, kept=held))
        self._open = list(kept.values())
        return found

    def keep_open(self, limit_s: float) -> None:
        """Leaves out ways to keep states with which nothing comes below the limit."""
        least = min(self._ratios.values())
        still = [one for one in self.plain if one.time_s * least < limit_s]
        self.tally.bounded += (len(self.plain) - len(still)) * len(self._agains)
        self.plain = still
        self._open = list(dict.fromkeys(one.kept for one in still))

    def lightest(self) -> list[tuple[_Kept, Again]]:
        """What has to be known of memory first."""
        return [(kept, self._agains[0]) for kept in self._open]

    def heavier(self) -> list[tuple[_Kept, Again]]:
        """What has to be known beyond: where the lightest does not fit, may not be taken, or is of
        a kind that may be slower than another."""
        is_first = min(self._ratios.values()) >= 1.0 and self._keep.allows(
            self._agains[0].of(self._layout)
        )
        return [
            (kept, again)
            for kept in self._open
            if not (is_first and kept.fits[self._agains[0]])
            for again in self._agains[1:]
        ]

    def choose(self, limit_s: float) -> None:
        """Which variants are timed exactly: the lightest that fit, where they may be among the
        best.  What computes more again of the same kind takes at least as long."""
        for one in self.plain:
            known = one.kept.fits
            allowed = [a for a in self._agains if known.get(a) and self._is_asked(one, a)]
            self.tally.over_memory += sum(not fits for fits in known.values())
            self.tally.dominated += len(self._agains) - len(known)
            light = [a for a in allowed if not any(b is not a and b.is_within(a) for b in allowed)]
            self.tally.dominated += sum(known.values()) - len(light)
            for again in light:
                if one.time_s * self._ratios[again.recompute] >= limit_s:
                    self.tally.bounded += 1
                else:
                    self.chosen.append(self._variant(one, again))
        self.tally.evaluated += len(self.chosen)

    def _is_asked(self, one: _Variant, again: Again) -> bool:
        return not self._keep.axes or self._keep.allows(again.of(one.config))

    def _variant(self, one: _Variant, again: Again) -> _Variant:
        order = one.order + 1000 * self._agains.index(again)
        return _Variant(config=again.of(one.config), order=order, kept=one.kept)

    def best(self) -> Ranked | None:
        """The fastest that was timed."""
        if not self.chosen:
            return None
        first = min(self.chosen, key=lambda one: (_rounded_log(one.time_s), one.order))
        return Ranked(
            config=first.config,
            time_s=first.time_s,
            order=int(self._study.cells.columns["number"][self._place]),
        )


def _rounded_log(time_s: float) -> float:
    return round(float(np.log(time_s)), _DECIMALS)


def _num_nodes(layout: RunConfig) -> int:
    """Nodes that the replicas of a layout lie on."""
    return group_call(layout, Collective.ALL_REDUCE, GroupRole.DP, 1).num_nodes


def num_variants(cells: Cells, members: Ints) -> int:
    """Variants of some cells."""
    if not len(members):
        return 0
    part = cells.subset(members)
    columns = part.columns
    keys = (columns["pp"], columns["vp"], columns["split"], columns["deep"])
    many = (columns["dp"] * columns["cp"] > 1).astype(np.int64)
    firsts, places = part.distinct(*keys, many, columns["dp"], columns["cp"], columns["tp"])
    numbers = []
    for first in firsts.tolist():
        layout = part.layout(first)
        agains = recomputes(layout, min(layout.chunk_layers))
        numbers.append(len(agains) * len(states(layout, _num_nodes(layout))))
    return int(np.bincount(places) @ np.array(numbers)) if numbers else 0
