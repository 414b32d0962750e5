"""The ranks that hold the others up, and what they cost; noise names none.

Blame goes to where the time is spent: a rank's own work (passes, optimizer and the time between
steps, all waiting left out) is held against that of the other ranks of its stage.  A rank that is
late because it waited has no excess.  What a rank costs is the step of everybody's own work minus
the same with this rank as fast as the slowest of its peers that does not stand out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from ..errors import CalibrationError, ConfigError
from ..regressors.intervals import Z_90
from ..samples.rank_compute import RankCompute, newest_rank_compute
from ..samples.reduce import MAD_EFFICIENCY, mad_sigma
from ..samples.table import SampleTable
from .cost import RankPlaces, step_floor_s
from .peers import link_stragglers, stage_compute
from .straggler import Straggler, StragglerKind, StragglerReport

Floats = NDArray[np.float64]

FALSE_ALARM = 0.02
"""Chance that anybody is named in a run in which all ranks of a stage are alike."""
LEAST_FRAC = 0.01
"""Share of the step; a smaller excess is not reported."""
# A scatter has to be seen: two values tell next to nothing of it.
_LEAST_SAMPLES = 3
_LEAST_CROWD = 6
"""Peers from which on their own spread is known."""
_LOOKS = ((1, 0.75 * FALSE_ALARM), (8, 0.25 * FALSE_ALARM))
"""Windows that are looked at together, and the share of false alarms that each look may have.

A window of few steps cannot tell what many agree on: of 4 steps Student's t asks 5 standard errors,
of 32 it asks 3.  The newest goes first, since a rank may have become slow in it.
"""
_STILL = 0.5
"""Of the excess in all windows, what the newest has to show: who was slow is not blamed for it."""


def find_stragglers(table: SampleTable, step_s: float) -> StragglerReport:
    """Who stands out in the newest run; ``step_s`` is its step, from which excesses are judged."""
    try:
        study = _study(table, step_s)
    except (CalibrationError, ConfigError) as err:
        return StragglerReport(reason=str(err))
    if study is None:
        return StragglerReport(reason="fewer than two ranks recorded what they did")
    found, compute, layout = study.named(), study.compute, study.layout
    taken = {rank for slow in found for rank in slow.ranks}
    links = [
        replace(link, stage=_stage_of(layout, compute, link.ranks))
        for link in link_stragglers(table, least_s=LEAST_FRAC * step_s, false_alarm=FALSE_ALARM)
        if not taken & set(link.ranks)
    ]
    every = sorted([*found, *links], key=lambda s: (-s.cost_s, -s.excess_s, s.ranks))
    return StragglerReport(
        slow=tuple(every),
        cost_s=study.cost_of(taken) + sum(link.cost_s for link in links),
        num_ranks=len(compute.ranks),
        reason="" if every else study.reason,
    )


def _study(table: SampleTable, step_s: float) -> _Study | None:
    """The newest window's, or, where nobody stands out in it, that of the windows before it too."""
    study = None
    for num_windows, false_alarm in _LOOKS:
        compute = newest_rank_compute(table, num_windows=num_windows)
        if compute is not None and len(compute.ranks) > 1:
            layout = RankPlaces.of(table.config(), compute.ranks.tolist())
            study = _Study(table, compute, layout, step_s=step_s, false_alarm=false_alarm)
        if study is None or study.places:
            break
    return study


def _stage_of(layout: RankPlaces, compute: RankCompute, ranks: Sequence[int]) -> int:
    """Stage of the first of the ranks that was compared; -1 where none was."""
    places = np.flatnonzero(np.isin(compute.ranks, list(ranks)))
    return int(layout.stages[places[0]]) if len(places) else -1


class _Study:
    """Own times of the newest window, or of several up to it, compared."""

    def __init__(
        self,
        table: SampleTable,
        compute: RankCompute,
        layout: RankPlaces,
        *,
        step_s: float,
        false_alarm: float,
    ) -> None:
        self.compute, self.layout = compute, layout
        self.step_s = step_s
        local = table.cluster().node.num_local_ranks
        per_node = table.config().parallelism.ranks_per_node
        # Hosts that NVLink joins are one node of the layout, and still fail one by one.
        self.ranks_per_host = local if 1 < local < per_node else per_node
        self.excess = excess_s(compute.work_s, layout.stages)
        crowd = np.bincount(layout.stages)[layout.stages]
        self.alone = crowd < 2
        self.tail = false_alarm / len(compute.ranks)
        self.stage_compute = stage_compute(table, self.tail) if self.alone.any() else {}
        number = len(compute.work_s)
        told = f"{number} sample{'s' * (number != 1)} of each rank"
        self.reason = f"no rank stands out in {told}"
        if number < _LEAST_SAMPLES and (crowd < _LEAST_CROWD).all():
            self.reason = f"{told} cannot tell, where ranks are few; record more steps"
        if self.alone.all() and not self.stage_compute:
            self.reason = "every stage has one rank and no operator in common with another"
        self.places = self._stand_out()

    def named(self) -> list[Straggler]:
        """Each rank that stands out."""
        hosts = self._slow_hosts()
        return [self._slow(place, hosts) for place in sorted(self.places)]

    def cost_of(self, ranks: set[int]) -> float:
        """What the step would gain if all these ranks were as fast as the rest, seconds."""
        places = [p for p in self.places if int(self.compute.ranks[p]) in ranks]
        return float(np.mean(self._gains(places))) if places else 0.0

    def _stand_out(self) -> set[int]:
        mean = self.excess.mean(axis=0)
        found = mean >= LEAST_FRAC * self.step_s
        found &= ~self.alone & _is_lasting(self.excess, self.layout.stages, self.tail)
        found &= _is_apart(mean, self.layout.stages, self.tail, is_needed=self._is_short)
        found &= self.excess[-self.compute.num_newest :].mean(axis=0) >= _STILL * mean
        lone = [
            p
            for p in np.flatnonzero(self.alone)
            if self._lone_excess_s(int(p)) >= LEAST_FRAC * self.step_s
        ]
        return {int(p) for p in np.flatnonzero(found)} | {int(p) for p in lone}

    @property
    def _is_short(self) -> bool:
        return len(self.excess) < _LEAST_SAMPLES

    def _lone_excess_s(self, place: int) -> float:
        """Of a rank alone on its stage: what its operators take beyond those of other stages."""
        found = self.stage_compute.get(int(self.layout.stages[place]))
        if found is None or found.low_log <= 0:
            return 0.0
        return float(self.compute.passes_s[:, place].mean()) * -float(np.expm1(-found.log))

    def _lone_error(self, place: int) -> float:
        """Half of a 90 % interval of such an excess, as a share of it."""
        found = self.stage_compute[int(self.layout.stages[place])]
        return Z_90 * found.sigma_log / float(np.expm1(found.log))

    def _slow(self, place: int, hosts: set[int]) -> Straggler:
        gains = self._gains([place])
        half = self._crowd_half_s(place)
        if len(gains) > 1:
            half = float(stdtrit(len(gains) - 1, 0.95) * gains.std(ddof=1) / np.sqrt(len(gains)))
        cost, excess = float(gains.mean()), float(self.excess.mean(axis=0)[place])
        if self.alone[place]:
            half = float(np.hypot(half, cost * self._lone_error(place)))
            excess = self._lone_excess_s(place)
        rank = int(self.compute.ranks[place])
        return Straggler(
            ranks=(rank,),
            stage=int(self.layout.stages[place]),
            role="",
            kind=StragglerKind.HOST if rank in hosts else self._kind(place),
            excess_s=excess,
            cost_s=cost,
            low_s=cost - half,
            high_s=cost + half,
        )

    def _crowd_half_s(self, place: int) -> float:
        """Half of a 90 % interval where one sample is all there is: from the peers' spread."""
        peers = self.excess.mean(axis=0)[self.layout.stages == self.layout.stages[place]]
        return float(stdtrit(max(1.0, MAD_EFFICIENCY * len(peers)), 0.95)) * mad_sigma(peers)

    def _gains(self, places: Sequence[int]) -> Floats:
        """Step minus the step in which these ranks are as fast as the rest, shape (samples,)."""
        passes, serial = self.compute.passes_s.copy(), self.compute.serial_s.copy()
        for place in places:
            if self.alone[place]:
                passes[:, place] -= self._lone_excess_s(place)
                continue
            other = self._next(place)
            passes[:, place] = self.compute.passes_s[:, other]
            serial[:, place] = self.compute.serial_s[:, other]
        before = step_floor_s(self.compute.passes_s, self.compute.serial_s, self.layout)
        return before - step_floor_s(passes, serial, self.layout)

    def _next(self, place: int) -> int:
        """The slowest rank of its stage that does not stand out; of them all, where all do."""
        peers = np.flatnonzero(self.layout.stages == self.layout.stages[place])
        rest = [int(p) for p in peers if int(p) not in self.places] or peers.tolist()
        work = self.compute.work_s.mean(axis=0)
        return max(rest, key=lambda p: (float(work[p]), p))

    def _kind(self, place: int) -> StragglerKind:
        if self.alone[place]:
            return StragglerKind.COMPUTE
        whole = float(self.excess.mean(axis=0)[place])
        for part, kind in (
            (self.compute.data_s, StragglerKind.DATA),
            (self.compute.between_s, StragglerKind.HOST),
        ):
            if float(excess_s(part, self.layout.stages).mean(axis=0)[place]) > whole / 2:
                return kind
        return StragglerKind.COMPUTE

    def _slow_hosts(self) -> set[int]:
        """Ranks of nodes of which every compared rank stands out, where other nodes have none."""
        per_node = self.ranks_per_host
        if per_node < 2:
            return set()
        nodes = self.compute.ranks // per_node
        named = {int(p) for p in self.places}
        full = [
            node
            for node in np.unique(nodes)
            if (here := np.flatnonzero(nodes == node)).size > 1 and set(here.tolist()) <= named
        ]
        if len(full) == len(np.unique(nodes)):
            return set()
        return {int(rank) for rank in self.compute.ranks[np.isin(nodes, full)]}


def excess_s(values: Floats, stages: NDArray[np.int64]) -> Floats:
    """Each rank's value less the median of the others of its stage, shape (samples, ranks).

    >>> excess_s(np.array([[1.0, 1.0, 1.5]]), np.array([0, 0, 0])).tolist()
    [[-0.25, -0.25, 0.5]]
    """
    out = np.zeros_like(values)
    for stage in np.unique(stages):
        here = np.flatnonzero(stages == stage)
        if len(here) < 2:
            continue
        part = np.sort(values[:, here], axis=1)
        place = np.argsort(np.argsort(values[:, here], axis=1, kind="stable"), axis=1)
        # Without the value at ``place``, those behind it move up by one.
        low, high = (len(here) - 2) // 2, (len(here) - 1) // 2
        lower = np.take_along_axis(part, low + (place <= low), axis=1)
        upper = np.take_along_axis(part, high + (place <= high), axis=1)
        out[:, here] = values[:, here] - (lower + upper) / 2
    return out


def _is_lasting(excess: Floats, stages: NDArray[np.int64], tail: float) -> NDArray[np.bool_]:
    """Where the mean over the samples is above 0 by Student's t; True where they are too few.

    Many peers tell together how much one sample scatters; a rank's own samples must agree.
    """
    number, mean = len(excess), excess.mean(axis=0)
    if number < _LEAST_SAMPLES:
        return np.ones(excess.shape[1], dtype=bool)
    error = excess.std(axis=0, ddof=1) / np.sqrt(number)
    out = mean > float(stdtrit(number - 1, 1 - tail)) * error
    for stage in np.unique(stages):
        here = np.flatnonzero(stages == stage)
        if len(here) < _LEAST_CROWD:
            continue
        pooled = float(np.sqrt(np.mean(error[here] ** 2)))
        enough = float(stdtrit((number - 1) * (len(here) - 1), 1 - tail)) * pooled
        own = float(stdtrit(number - 1, 1 - FALSE_ALARM)) * error[here]
        out[here] = mean[here] > np.maximum(enough, own)
    return out


def _is_apart(
    mean: Floats, stages: NDArray[np.int64], tail: float, *, is_needed: bool
) -> NDArray[np.bool_]:
    """Where a rank lies beyond the spread of its peers; too few peers decide by ``is_needed``."""
    out = np.full(len(mean), not is_needed)
    for stage in np.unique(stages):
        here = np.flatnonzero(stages == stage)
        if len(here) < _LEAST_CROWD:
            continue
        part = mean[here]
        out[here] = part > float(stdtrit(MAD_EFFICIENCY * len(here), 1 - tail)) * mad_sigma(part)
    return out
