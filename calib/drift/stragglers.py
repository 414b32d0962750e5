"""Stragglers and their cost, with a controlled rate of false alarms.

A rank's work (passes, optimizer and time between steps, without any waiting) is compared with that
of the other ranks of its stage, so that a rank that is late because it waited has no excess.  The
cost of a rank is the step computed from all ranks' work minus the same with this rank as fast as
the slowest of its peers that is no straggler.

Transfers of groups of one role, and operators common to stages with one rank each, are compared
with each other as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from ..errors import CalibrationError, ConfigError
from ..plain_json import JsonObject
from ..regressors.estimate import Estimate
from ..regressors.robust import Z_90
from ..samples.rank_compute import RankCompute, newest_rank_compute
from ..samples.reduce import MAD_EFFICIENCY, mad_sigma, median_error_log, median_of_others
from ..samples.table import SampleTable, newest_window
from ..timeline.compiled import pipeline_of
from ..timeline.evaluation import simulate_long
from ..timeline.graph import pipeline_costs
from ..timeline.programs import Pipeline
from ..units import format_frac, format_ranks, format_time
from ..workload.config import RunConfig
from ..workload.config_json import Encoded, encoded
from ..workload.operators import OperatorKind
from ..workload.ranks import position

Places = NDArray[np.int64]
FORWARD_FRAC = 1 / 3
"""Share of the forward pass; the backward pass has two products for each of its."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlaces:
    """Stage and replica of the compared ranks, ``(ranks,)`` each."""

    stages: Places
    replicas: Places
    pipeline: Pipeline

    @staticmethod
    def of(config: RunConfig, ranks: Sequence[int]) -> RankPlaces:
        """Return the places of global ranks; raises ``ConfigError`` if one is not in the layout."""
        par = config.parallelism
        if max(ranks) >= par.num_ranks:
            raise ConfigError(
                f"rank {max(ranks)} is not in a layout of {par.num_ranks} ranks; record it again"
            )
        places = [position(par, rank) for rank in ranks]
        return RankPlaces(
            stages=np.array([place.stage for place in places]),
            replicas=np.array([place.dp_rank for place in places]),
            pipeline=pipeline_of(config),
        )


def step_floor_s(passes_s: Floats, serial_s: Floats, layout: RankPlaces) -> Floats:
    """Return step times without transfers, shape (samples,), from work of shape (samples, ranks).

    Ranks of one stage and replica (tensor and context parallel) advance in lockstep with the
    slowest; stages of a replica follow their schedule, with equal micro-batches.  The slowest
    replica and the slowest rank's serial part add up.

    >>> two = RankPlaces(stages=np.array([0, 1]), replicas=np.array([0, 0]),
    ...              pipeline=Pipeline(num_stages=2, num_microbatches=4))
    >>> step_floor_s(np.array([[4.0, 8.0]]), np.array([[1.0, 0.5]]), two)
    array([10.])
    """
    num_stages = layout.pipeline.num_stages
    shape = (len(passes_s), int(layout.replicas.max()) + 1, num_stages)
    slowest = np.zeros(shape)
    for place, (replica, stage) in enumerate(zip(layout.replicas, layout.stages, strict=True)):
        here = slowest[:, replica, stage]
        np.maximum(here, passes_s[:, place], out=here)
    # Chunk c runs on stage c % pp.
    num_passes = layout.pipeline.num_microbatches * layout.pipeline.num_virtual_stages
    each_s = np.tile(
        slowest.reshape(-1, num_stages).T / num_passes, (layout.pipeline.num_virtual_stages, 1)
    )
    costs = pipeline_costs(
        each_s * FORWARD_FRAC,
        each_s * (1 - FORWARD_FRAC),
        num_virtual_stages=layout.pipeline.num_virtual_stages,
    )
    (simulation,) = simulate_long([(costs, layout.pipeline)])
    return simulation.makespan_s.reshape(shape[:2]).max(axis=1) + serial_s.max(axis=1)


Floats = NDArray[np.float64]

FALSE_ALARM = 0.02
"""Probability that any rank is named in a run whose ranks per stage are identical."""
LEAST_FRAC = 0.01
"""Smallest excess that is reported, as a share of the step."""
# Two values hardly constrain a scatter.
_LEAST_SAMPLES = 3
_LEAST_CROWD = 6
"""Fewest peers for an estimate of their spread."""
_LOOKS = ((1, 0.75 * FALSE_ALARM), (8, 0.25 * FALSE_ALARM))
"""Numbers of windows that are tested together, and the false-alarm rate of each test.

Few steps need a larger effect: Student's t needs 5 standard errors for 4 steps, and 3 for 32.  The
newest window is first, since a rank may have become slow in it.
"""
_STILL = 0.5
"""Smallest excess in the newest window relative to all, so that recovered ranks are not named."""
LEAST_SLOWER_FRAC = 0.1
"""Relative difference of transfers that is normal between links of one kind."""
REPEAT_SIGMA_LOG = 0.02
"""Standard deviation (log) of medians of the same work on different ranks."""
_TRANSFER = ["kind", "role", "num_ranks", "num_nodes", "nbytes"]
_OPERATOR = ["kind", "phase", "shape", "element_nbytes"]
_HOST = [OperatorKind.HOST_MICROBATCH.value, OperatorKind.HOST_STEP.value]


class StragglerKind(Enum):
    """Part of the step in which a straggler loses time."""

    COMPUTE = "compute"
    DATA = "data"
    HOST = "host"
    LINK = "link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is slower than its peers, or the ranks of a group with a slow link.

    Times are per step: ``excess_s`` beyond the median of the peers; ``cost_s`` that the step would
    save if it were as fast as the next, within ``low_s`` and ``high_s`` (90 %).
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
class StragglerReport(Encoded):
    """Stragglers, costliest first; ``reason`` is why there are none."""

    slow: tuple[Straggler, ...] = ()
    cost_s: float = 0.0
    """Time that the step would save if all of them were as fast as the rest."""
    num_ranks: int = 0
    """Number of compared ranks."""
    reason: str = ""


def find_stragglers(table: SampleTable, step_s: float) -> StragglerReport:
    """Return the stragglers of the newest run; ``step_s`` is its step, for relative thresholds."""
    try:
        study = _study(table, step_s)
    except (CalibrationError, ConfigError) as err:
        return StragglerReport(reason=str(err))
    if study is None:
        return StragglerReport(reason="fewer than two ranks recorded their work")
    stragglers, compute, layout = study.named(), study.compute, study.layout
    taken = {rank for slow in stragglers for rank in slow.ranks}
    links = [
        replace(link, stage=_stage_of(layout, compute, link.ranks))
        for link in link_stragglers(table, least_s=LEAST_FRAC * step_s, false_alarm=FALSE_ALARM)
        if not taken & set(link.ranks)
    ]
    every = sorted([*stragglers, *links], key=lambda s: (-s.cost_s, -s.excess_s, s.ranks))
    return StragglerReport(
        slow=tuple(every),
        cost_s=study.cost_of(taken) + sum(link.cost_s for link in links),
        num_ranks=len(compute.ranks),
        reason="" if every else study.reason,
    )


def _study(table: SampleTable, step_s: float) -> _Study | None:
    """Return the study of the newest window or, if that has no straggler, of several windows."""
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
    """Return the stage of the first compared rank; -1 if none was compared."""
    places = np.flatnonzero(np.isin(compute.ranks, list(ranks)))
    return int(layout.stages[places[0]]) if len(places) else -1


class _Study:
    """Comparison of ranks' work in the newest window, or in several up to it."""

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
        # Hosts joined by NVLink are one node of the layout, but fail independently.
        self.ranks_per_host = local if 1 < local < per_node else per_node
        self.excess = excess_s(compute.work_s, layout.stages)
        crowd = np.bincount(layout.stages)[layout.stages]
        self.alone = crowd < 2
        self.tail = false_alarm / len(compute.ranks)
        self.stage_slowness = stage_slowness(table) if self.alone.any() else {}
        number = len(compute.work_s)
        samples_text = f"{number} sample{'s' * (number != 1)} of each rank"
        self.reason = f"no rank stands out in {samples_text}"
        if number < _LEAST_SAMPLES and (crowd < _LEAST_CROWD).all():
            self.reason = f"{samples_text}: too few to compare few ranks; record more steps"
        if self.alone.all() and not self.stage_slowness:
            self.reason = "every stage has one rank and no operator in common with another"
        self.places = self._stand_out()

    def named(self) -> list[Straggler]:
        """Return the stragglers."""
        hosts = self._slow_hosts()
        return [self._slow(place, hosts) for place in sorted(self.places)]

    def cost_of(self, ranks: set[int]) -> float:
        """Return the seconds that the step would save if these ranks were as fast as the rest."""
        places = [p for p in self.places if int(self.compute.ranks[p]) in ranks]
        return float(np.mean(self._gains(places))) if places else 0.0

    def _stand_out(self) -> set[int]:
        mean = self.excess.mean(axis=0)
        is_slow = mean >= LEAST_FRAC * self.step_s
        is_slow &= ~self.alone & _is_lasting(self.excess, self.layout.stages, self.tail)
        is_slow &= _is_apart(
            mean, self.layout.stages, self.tail, is_needed=len(self.excess) < _LEAST_SAMPLES
        )
        is_slow &= self.excess[-self.compute.num_newest :].mean(axis=0) >= _STILL * mean
        lone = [
            p
            for p in np.flatnonzero(self.alone)
            if self._lone_excess_s(int(p)) >= LEAST_FRAC * self.step_s
        ]
        return {int(p) for p in np.flatnonzero(is_slow)} | {int(p) for p in lone}

    def _lone_excess_s(self, place: int) -> float:
        """Return the excess of the only rank of a stage over the same operators on other stages."""
        slowness = self.stage_slowness.get(int(self.layout.stages[place]))
        # The stage is surely slower if the end of its interval at ``tail`` is above 1.
        if slowness is None or slowness.below(1.0) >= self.tail:
            return 0.0
        return float(self.compute.passes_s[:, place].mean()) * (1.0 - 1.0 / slowness.median)

    def _slow(self, place: int, hosts: set[int]) -> Straggler:
        gains = self._gains([place])
        half = self._crowd_half_s(place)
        if len(gains) > 1:
            half = float(stdtrit(len(gains) - 1, 0.95) * gains.std(ddof=1) / np.sqrt(len(gains)))
        cost, excess = float(gains.mean()), float(self.excess.mean(axis=0)[place])
        if self.alone[place]:
            slowness = self.stage_slowness[int(self.layout.stages[place])]
            error_frac = Z_90 * slowness.sigma_log / (slowness.median - 1.0)
            half = float(np.hypot(half, cost * error_frac))
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
        """Return half the 90 % interval from the peers' spread, for a single sample."""
        peers = self.excess.mean(axis=0)[self.layout.stages == self.layout.stages[place]]
        return float(stdtrit(max(1.0, MAD_EFFICIENCY * len(peers)), 0.95)) * mad_sigma(peers)

    def _gains(self, places: Sequence[int]) -> Floats:
        """Return the step minus that with these ranks as fast as the rest, shape (samples,)."""
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
        """Return the slowest rank of its stage that is no straggler; of all ranks if all are."""
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
        """Return ranks of nodes where all compared ranks are stragglers; none if all nodes are."""
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
    """Return each rank's value minus the median of its stage's others, shape (samples, ranks).

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
    """Return ranks with a mean over samples above 0 by Student's t; True if there are too few.

    With many peers, their pooled scatter is used, and a rank's own samples must agree.
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
        per_rank_threshold = float(stdtrit(number - 1, 1 - FALSE_ALARM)) * error[here]
        out[here] = mean[here] > np.maximum(enough, per_rank_threshold)
    return out


def _is_apart(
    mean: Floats, stages: NDArray[np.int64], tail: float, *, is_needed: bool
) -> NDArray[np.bool_]:
    """Return ranks beyond the spread of their peers; ``not is_needed`` if there are too few."""
    out = np.full(len(mean), not is_needed)
    for stage in np.unique(stages):
        here = np.flatnonzero(stages == stage)
        if len(here) < _LEAST_CROWD:
            continue
        part = mean[here]
        out[here] = part > float(stdtrit(MAD_EFFICIENCY * len(here), 1 - tail)) * mad_sigma(part)
    return out


def link_stragglers(table: SampleTable, *, least_s: float, false_alarm: float) -> list[Straggler]:
    """Return groups of the newest window with an exposed excess of at least ``least_s`` per step.

    The excess is relative to the same transfers of other groups; the cost is its exposed part.
    """
    rows = newest_window(table.newest("links"))
    rows = rows[rows["num_steps"] > 1]
    rows = rows[rows.groupby(_TRANSFER)["ranks"].transform("nunique") > 1]
    if rows.empty:
        return []
    each = rows["count"] / rows["num_steps"]
    rows = rows.assign(
        whole_s=rows["time_s"] * each,
        excess_s=_beyond(rows, "time_s") * each,
        cost_s=_beyond(rows, "exposed_s") * each,
        # sqrt(2), as the others' median is as uncertain as the value compared with it.
        error_s=np.sqrt(2) * median_error_log(rows) * rows["time_s"] * each,
    )
    sums = rows.groupby(["role", "ranks"], sort=True)[
        ["whole_s", "excess_s", "cost_s", "error_s"]
    ].sum()
    # Bonferroni over all compared groups.
    strict = float(ndtri(1 - false_alarm / len(sums)))
    stragglers = []
    for (role, ranks), row in zip(sums.index.tolist(), sums.to_dict("records"), strict=True):
        usual_s = row["whole_s"] - row["excess_s"]
        is_slow = row["excess_s"] > max(strict * row["error_s"], LEAST_SLOWER_FRAC * usual_s)
        if is_slow and row["cost_s"] >= least_s:
            stragglers.append(
                Straggler(
                    kind=StragglerKind.LINK,
                    stage=-1,
                    role=role,
                    ranks=tuple(int(rank) for rank in ranks.split(",")),
                    excess_s=row["excess_s"],
                    cost_s=row["cost_s"],
                    low_s=row["cost_s"] - Z_90 * row["error_s"],
                    high_s=row["cost_s"] + Z_90 * row["error_s"],
                )
            )
    return stragglers


def _beyond(rows: pd.DataFrame, column: str) -> pd.Series:
    """Return each group's value minus the median of other groups with the same transfer."""
    return rows[column] - median_of_others(rows, column, _TRANSFER)


def stage_slowness(table: SampleTable) -> dict[int, Estimate]:
    """Return the time of each stage's operators in the newest window over that of the same ones on
    other stages; errors of a stage's operators are taken as fully correlated."""
    rows = table.operators
    rows = rows[(rows["run_id"] == table.run_id) & ~rows["kind"].isin(_HOST) & ~rows["is_probe"]]
    rows = newest_window(rows)
    rows = rows[rows["time_s"] > 0]
    shared = rows.groupby(_OPERATOR)["stage"].transform("nunique") > 1
    rows = rows[shared]
    if rows.empty:
        return {}
    others = median_of_others(rows, "time_s", _OPERATOR)
    error = median_error_log(rows)
    each = rows["count"] / rows["num_steps"].clip(lower=1)
    sums = rows.assign(
        stage_s=each * rows["time_s"],
        others=each * others,
        error=each * others * np.hypot(error, REPEAT_SIGMA_LOG),
    )
    sums = sums.groupby("stage", sort=True)[["stage_s", "others", "error"]].sum()
    return {
        int(str(stage)): Estimate(
            median=stage_s / others_s,
            # The values compared with are as uncertain.
            unshared_sigma_log=math.sqrt(2) * error_s / others_s,
        )
        for stage, stage_s, others_s, error_s in sums.itertuples()
    }


SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWaiting:
    """Time per step that a rank is blocked in groups of a role, mean over ranks.

    ``transfer_s`` is the time that even the last rank to arrive is blocked; ``wait_s`` is the wait
    for that rank.
    """

    role: str
    transfer_s: float
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A rank's clock, ahead of the reference by ``low_s`` to ``high_s`` at mid-window."""

    rank: int
    reference: int
    offset_s: float
    low_s: float
    high_s: float
    drift_frac: float
    is_reached: bool
    """False if no collective relates it to the reference; the offset is unknown then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingReport(Encoded):
    """Waiting, stragglers and clocks in the newest window of the newest run."""

    schema: ClassVar[int] = SCHEMA

    step_s: float
    roles: tuple[RoleWaiting, ...]
    slow: StragglerReport
    clocks: tuple[Clock, ...]
    """Clocks that differ from the reference, or may."""
    last_frac: Mapping[int, float]
    """Share of its groups' collectives at which a rank arrived last, by rank."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(
            schema=self.schema,
            step_time_s=self.step_s,
            roles=self.roles,
            **self.slow.to_json(),
            clocks=self.clocks,
            last_frac=self.last_frac,
        )

    @property
    def line(self) -> str:
        """Stragglers in a line if they cost at least 1 % of the step; else empty."""
        if not self.slow.slow or self.slow.cost_s < LEAST_FRAC * self.step_s:
            return ""
        first = self.slow.slow[0]
        alike = [s for s in self.slow.slow if (s.kind, s.role) == (first.kind, first.role)]
        share = format_frac(self.slow.cost_s / self.step_s)
        cost = f"each step {format_time(self.slow.cost_s)} longer ({share})"
        return f"slow: {_who(alike)} · {cost} · cause: {first.kind.value}"


def waiting_report(table: SampleTable, step_s: float) -> WaitingReport:
    """Return the report on the newest window; ``step_s`` is the run's step, for relative costs."""
    frames = map(table.newest, ("skew", "arrivals", "clocks"))
    skew, arrivals, clocks = map(newest_window, frames)
    num_ranks = max(1, skew["rank"].nunique())
    sums = skew.groupby("role", sort=True)[["transfer_s", "wait_s"]].sum() / num_ranks
    seen = arrivals.groupby("rank", sort=True)[["num_last", "num_events"]].sum()
    shares = seen["num_last"] / seen["num_events"].clip(lower=1)
    apart = clocks[~clocks["is_shared"]]
    columns = ("rank", "reference", "offset_s", "low_s", "high_s", "drift_frac", "is_reached")
    return WaitingReport(
        step_s=step_s,
        roles=tuple(
            RoleWaiting(role=str(role), transfer_s=float(row[0]), wait_s=float(row[1]))
            for role, row in zip(sums.index, sums.to_numpy(), strict=True)
        ),
        slow=find_stragglers(table, step_s),
        clocks=tuple(Clock(**row) for row in apart[list(columns)].to_dict("records")),
        last_frac={int(str(rank)): float(frac) for rank, frac in shares.items()},
    )


def _who(slow: list[Straggler]) -> str:
    """Return ranks in short, with their stage or the role of their group.

    >>> one = dict(role="", excess_s=0.1, cost_s=0.1, low_s=0.1, high_s=0.1)
    >>> from forerun.calib.drift.stragglers import StragglerKind
    >>> _who([Straggler(ranks=(3,), stage=1, kind=StragglerKind.COMPUTE, **one)])
    'rank 3 (stage 1)'
    """
    ranks = sorted({rank for s in slow for rank in s.ranks})
    stages = sorted({s.stage for s in slow})
    if slow[0].role:
        return f"{slow[0].role} group of {format_ranks(ranks)}"
    where = f"stage {stages[0]}" if len(stages) == 1 else f"{len(stages)} stages"
    return f"{format_ranks(ranks)} ({where})"
