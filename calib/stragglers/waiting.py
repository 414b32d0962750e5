"""What a run's ranks wait for: transfers and each other, the slowest of them, their clocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd

from ..samples.table import SampleTable
from ..units import format_frac, format_ranks, format_time
from ..workload.config_json import Encoded
from .detection import LEAST_FRAC, Straggler, StragglerReport, find_stragglers

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWaiting:
    """Time per step that a rank stands still for the groups of a role, mean over ranks.

    ``transfer_s`` is what the last rank to come stands still too, ``wait_s`` what is waited for it.
    """

    role: str
    transfer_s: float
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A clock that is not the reference's: it is ahead by ``low_s`` to ``high_s`` in mid-window."""

    rank: int
    reference: int
    offset_s: float
    low_s: float
    high_s: float
    drift_frac: float
    is_reached: bool
    """False where no collective ties it to the reference: the offset is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingReport(Encoded):
    """Of the newest window of the newest run."""

    JSON: ClassVar[str] = "schema step_time_s=step_s roles **slow clocks last_frac"
    schema: ClassVar[int] = SCHEMA

    step_s: float
    roles: tuple[RoleWaiting, ...]
    slow: StragglerReport
    clocks: tuple[Clock, ...]
    """Those that differ from the reference's, or may."""
    last_frac: Mapping[int, float]
    """Share of the collectives of its groups that a rank was the last to come to, by rank."""

    @property
    def line(self) -> str:
        """One line on what stands out and costs a hundredth of the step; else empty."""
        if not self.slow.slow or self.slow.cost_s < LEAST_FRAC * self.step_s:
            return ""
        first = self.slow.slow[0]
        alike = [s for s in self.slow.slow if (s.kind, s.role) == (first.kind, first.role)]
        share = format_frac(self.slow.cost_s / self.step_s)
        cost = f"each step {format_time(self.slow.cost_s)} longer ({share})"
        return f"slow: {_who(alike)} · {cost} · cause: {first.kind.value}"


def waiting_report(table: SampleTable, step_s: float) -> WaitingReport:
    """What the newest window says; ``step_s`` is the run's step, against which costs are held."""
    skew, arrivals, clocks = (_newest(table, name) for name in ("skew", "arrivals", "clocks"))
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


def _newest(table: SampleTable, name: str) -> pd.DataFrame:
    rows = table.newest(name)
    return rows[rows["window"] == rows["window"].max()]


def _who(slow: list[Straggler]) -> str:
    """The ranks in short, with their stage or the role of their group.

    >>> one = dict(role="", excess_s=0.1, cost_s=0.1, low_s=0.1, high_s=0.1)
    >>> from forerun.calib.stragglers.detection import StragglerKind
    >>> _who([Straggler(ranks=(3,), stage=1, kind=StragglerKind.COMPUTE, **one)])
    'rank 3 (stage 1)'
    """
    ranks = sorted({rank for s in slow for rank in s.ranks})
    stages = sorted({s.stage for s in slow})
    if slow[0].role:
        return f"{slow[0].role} group of {format_ranks(ranks)}"
    where = f"stage {stages[0]}" if len(stages) == 1 else f"{len(stages)} stages"
    return f"{format_ranks(ranks)} ({where})"
