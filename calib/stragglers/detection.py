"""The ranks that hold the others up, and what they cost; nobody is named for noise.

Blame goes to where the time is spent: a rank's own work (passes, optimizer and the time between
steps, all waiting left out) is held against that of the other ranks of its stage.  A rank that is
late because it waited has no excess.  What a rank costs is the step of everybody's own work minus
the same with this rank as fast as the slowest of its peers that does not stand out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, t

from ..errors import CalibrationError, ConfigError
from ..samples.rank_compute import RankCompute, newest_rank_compute
from ..samples.reduce import MAD_TO_SIGMA
from ..samples.table import SampleTable
from ..workload.config import RunConfig
from .cost import RankPlaces, step_floor_s
from .links import link_stragglers
from .stages import stage_compute

Floats = NDArray[np.float64]

FALSE_ALARM = 0.02
"""Chance that anybody is named in a run in which all ranks of a stage are alike."""
LEAST_FRAC = 0.01
"""Of the step: a smaller excess is nobody's business."""
Z_90 = float(norm.ppf(0.95))
_LEAST_SAMPLES = 3
_LEAST_CROWD = 6
"""Peers from which on their own spread is known."""
_MAD_EFFICIENCY = 0.37
"""Of the median deviation on normal data: so many of its values count as degrees of freedom."""


class StragglerKind(Enum):
    """Where the time goes."""

    COMPUTE = "compute"
    DATA = "data"
    HOST = "host"
    LINK = "link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank, or the ranks of a group with a slow link, that stands out from its peers.

    Times are per step: ``excess_s`` beyond the median of the peers, ``cost_s`` what the step would
    gain if it were as fast as the next, within ``low_s`` and ``high_s`` (90 %).
    """

    ranks: tuple[int, ...]
    stage: int
    role: str
    kind: StragglerKind
    excess_s: float
    cost_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerReport:
    """Who stands out, the costliest first; ``reason`` says why nobody does."""

    slow: tuple[Straggler, ...] = ()
    cost_s: float = 0.0
    """What the step would gain if all of them were as fast as the rest."""
    num_ranks: int = 0
    """Ranks that were compared."""
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        rows = [{**asdict(s), "kind": s.kind.value, "ranks": list(s.ranks)} for s in self.slow]
        return {
            "slow": rows,
            "cost_s": self.cost_s,
            "num_ranks": self.num_ranks,
            "reason": self.reason,
        }


def find_stragglers(table: SampleTable, step_s: float) -> StragglerReport:
    """Who stands out in the newest run; ``step_s`` is its step, from which excesses are judged."""
    try:
        config = table.config()
        pace = newest_rank_compute(table)
        if pace is None or len(pace.ranks) < 2:
            return StragglerReport(reason="fewer than two ranks told what they did")
        layout = RankPlaces.of(config, pace.ranks.tolist())
    except (CalibrationError, ConfigError) as err:
        return StragglerReport(reason=str(err))
    study = _Study(table, config, pace, layout, step_s)
    found = study.named()
    taken = {rank for slow in found for rank in slow.ranks}
    links = [
        Straggler(
            ranks=link.ranks,
            stage=layout_stage(layout, pace, link.ranks),
            role=link.role,
            kind=StragglerKind.LINK,
            excess_s=link.excess_s,
            cost_s=link.cost_s,
            low_s=link.low_s,
            high_s=link.high_s,
        )
        for link in link_stragglers(table, least_s=LEAST_FRAC * step_s, false_alarm=FALSE_ALARM)
        if not taken & set(link.ranks)
    ]
    every = sorted([*found, *links], key=lambda s: (-s.cost_s, -s.excess_s, s.ranks))
    return StragglerReport(
        slow=tuple(every),
        cost_s=study.cost_of(taken) + sum(link.cost_s for link in links),
        num_ranks=len(pace.ranks),
        reason="" if every else study.reason,
    )


def layout_stage(layout: RankPlaces, pace: RankCompute, ranks: Sequence[int]) -> int:
    """Stage of the first of the ranks that was compared; -1 where none was."""
    places = np.flatnonzero(np.isin(pace.ranks, list(ranks)))
    return int(layout.stages[places[0]]) if len(places) else -1


class _Study:
    """One window's own times, compared."""

    def __init__(
        self,
        table: SampleTable,
        config: RunConfig,
        pace: RankCompute,
        layout: RankPlaces,
        step_s: float,
    ) -> None:
        self.pace, self.layout, self.config = pace, layout, config
        self.step_s = step_s
        self.excess = excess_s(pace.work_s, layout.stages)
        crowd = np.bincount(layout.stages)[layout.stages]
        self.alone = crowd < 2
        self.tail = FALSE_ALARM / len(pace.ranks)
        self.stage_compute = stage_compute(table, self.tail) if self.alone.any() else {}
        self.reason = "no rank stands out"
        if len(pace.work_s) < _LEAST_SAMPLES and (crowd < _LEAST_CROWD).all():
            self.reason = f"{len(pace.work_s)} samples of so few ranks do not tell"
        if self.alone.all() and not self.stage_compute:
            self.reason = "every stage has one rank and no operator in common with another"
        self.places = self._stand_out()

    def named(self) -> list[Straggler]:
        """Each rank that stands out."""
        hosts = self._slow_hosts()
        return [self._slow(place, hosts) for place in sorted(self.places)]

    def cost_of(self, ranks: set[int]) -> float:
        """What the step would gain if all these ranks were as fast as the rest, seconds."""
        places = [p for p in self.places if int(self.pace.ranks[p]) in ranks]
        return float(np.mean(self._gains(places))) if places else 0.0

    def _stand_out(self) -> set[int]:
        mean = self.excess.mean(axis=0)
        found = mean >= LEAST_FRAC * self.step_s
        found &= ~self.alone & _is_lasting(self.excess, self.layout.stages, self.tail)
        found &= _is_apart(mean, self.layout.stages, self.tail, is_needed=self._is_short)
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
        return float(self.pace.passes_s[:, place].mean()) * -float(np.expm1(-found.log))

    def _lone_error(self, place: int) -> float:
        """Half of a 90 % interval of such an excess, as a share of it."""
        found = self.stage_compute[int(self.layout.stages[place])]
        return Z_90 * found.sigma_log / float(np.expm1(found.log))

    def _slow(self, place: int, hosts: set[int]) -> Straggler:
        gains = self._gains([place])
        half = 0.0
        if len(gains) > 1:
            half = float(t.ppf(0.95, len(gains) - 1) * gains.std(ddof=1) / np.sqrt(len(gains)))
        else:
            half = self._crowd_half_s(place)
        cost = float(gains.mean())
        if self.alone[place]:
            half = float(np.hypot(half, cost * self._lone_error(place)))
        rank = int(self.pace.ranks[place])
        is_alone = bool(self.alone[place])
        return Straggler(
            ranks=(rank,),
            stage=int(self.layout.stages[place]),
            role="",
            kind=StragglerKind.HOST if rank in hosts else self._kind(place),
            excess_s=self._lone_excess_s(place)
            if is_alone
            else float(self.excess.mean(axis=0)[place]),
            cost_s=cost,
            low_s=cost - half,
            high_s=cost + half,
        )

    def _crowd_half_s(self, place: int) -> float:
        """Half of a 90 % interval where one sample is all there is: from the peers' spread."""
        peers = self.excess.mean(axis=0)[self.layout.stages == self.layout.stages[place]]
        sigma = MAD_TO_SIGMA * float(np.median(np.abs(peers - np.median(peers))))
        return float(t.ppf(0.95, max(1.0, _MAD_EFFICIENCY * len(peers)))) * sigma

    def _gains(self, places: Sequence[int]) -> Floats:
        """Step minus the step in which these ranks are as fast as the rest, shape (samples,)."""
        passes, serial = self.pace.passes_s.copy(), self.pace.serial_s.copy()
        for place in places:
            if self.alone[place]:
                passes[:, place] -= self._lone_excess_s(place)
                continue
            other = self._next(place)
            passes[:, place] = self.pace.passes_s[:, other]
            serial[:, place] = self.pace.serial_s[:, other]
        before = step_floor_s(self.pace.passes_s, self.pace.serial_s, self.layout)
        return before - step_floor_s(passes, serial, self.layout)

    def _next(self, place: int) -> int:
        """The slowest rank of its stage that does not stand out; of them all, where all do."""
        peers = np.flatnonzero(self.layout.stages == self.layout.stages[place])
        rest = [int(p) for p in peers if int(p) not in self.places] or peers.tolist()
        work = self.pace.work_s.mean(axis=0)
        return max(rest, key=lambda p: (float(work[p]), p))

    def _kind(self, place: int) -> StragglerKind:
        if self.alone[place]:
            return StragglerKind.COMPUTE
        whole = float(self.excess.mean(axis=0)[place])
        for part, kind in (
            (self.pace.data_s, StragglerKind.DATA),
            (self.pace.between_s, StragglerKind.HOST),
        ):
            if float(excess_s(part, self.layout.stages).mean(axis=0)[place]) > whole / 2:
                return kind
        return StragglerKind.COMPUTE

    def _slow_hosts(self) -> set[int]:
        """Ranks of nodes of which every compared rank stands out, where other nodes have none."""
        per_node = self.config.parallelism.ranks_per_node
        if per_node < 2:
            return set()
        nodes = self.pace.ranks // per_node
        named = {int(p) for p in self.places}
        full = [
            node
            for node in np.unique(nodes)
            if (here := np.flatnonzero(nodes == node)).size > 1 and set(here.tolist()) <= named
        ]
        if len(full) == len(np.unique(nodes)):
            return set()
        return {int(rank) for rank in self.pace.ranks[np.isin(nodes, full)]}


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
    out = mean > float(t.ppf(1 - tail, number - 1)) * error
    for stage in np.unique(stages):
        here = np.flatnonzero(stages == stage)
        if len(here) < _LEAST_CROWD:
            continue
        pooled = float(np.sqrt(np.mean(error[here] ** 2)))
        enough = float(t.ppf(1 - tail, (number - 1) * (len(here) - 1))) * pooled
        own = float(t.ppf(1 - FALSE_ALARM, number - 1)) * error[here]
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
        sigma = MAD_TO_SIGMA * np.median(np.abs(part - np.median(part)))
        out[here] = part > float(t.ppf(1 - tail, _MAD_EFFICIENCY * len(here))) * sigma
    return out
