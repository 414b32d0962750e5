"""Summary of a window's hooked steps in one small record, which every rank can send."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from ..workload.operators import OperatorKind, Phase
from .record_kinds import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    CollectiveRecord,
    OperatorRecord,
    PhaseRecord,
    RankRecord,
    Record,
)

_PHASES = (FORWARD, BACKWARD, OPTIMIZER)


@dataclass(slots=True)
class StepSums:
    """Self time of one step's phases, and its waiting time by role of the group."""

    phase_ns: Counter[str] = field(default_factory=Counter)
    wait_ns: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    grouped_rows: int = 0
    single_rows: Counter[int] = field(default_factory=Counter)
    """Rows by layer; some of these layers may have no experts."""
    routers: set[int] = field(default_factory=set)
    """Layers with a router."""

    def add(self, record: Record) -> None:
        """Add a record of the step; types but phases, operators and collectives are ignored."""
        if isinstance(record, PhaseRecord):
            if record.name in _PHASES:
                self_time_ns = record.duration_ns - record.wait_ns - record.hook_ns
                self.phase_ns[record.name] += max(0, self_time_ns)
        elif isinstance(record, OperatorRecord):
            self._add_routed(record)
        elif isinstance(record, CollectiveRecord) and len(record.ranks) > 1:
            self.wait_ns[record.role.value] += record.exposed_ns * record.stands_for

    def _add_routed(self, record: OperatorRecord) -> None:
        if record.phase is not Phase.FORWARD:
            return
        if record.kind is OperatorKind.GROUPED_LINEAR:
            self.grouped_rows += record.shape[1]
        elif record.kind is OperatorKind.LINEAR_FC1:
            self.single_rows[record.layer] += record.shape[0]
        elif record.kind is OperatorKind.ROUTER:
            self.routers.add(record.layer)

    @property
    def routed_rows(self) -> int:
        """Rows that arrived at the experts of this rank, in the passes whose operators are timed.

        A layer has two grouped products.  Without them, the rows of single products include those
        of shared experts, which are equal on all ranks.
        """
        return self.grouped_rows // 2 or sum(self.single_rows[layer] for layer in self.routers)


def summarise(
    window: int, step_ns: Mapping[int, int], sums: Mapping[int, StepSums], memory_peak_nbytes: int
) -> RankRecord:
    """Return medians over the steps that are in both mappings, by step number.

    Waiting is a mean: not every step of a window may have timed it, and timed calls stand for the
    others.
    """
    steps = sorted(step_ns.keys() & sums.keys())
    roles = sorted({role for step in steps for role in sums[step].wait_ns})
    known = [sums[step] for step in steps]
    return RankRecord(
        window=window,
        num_steps=len(steps),
        step_ns=_median(step_ns[step] for step in steps),
        forward_ns=_median(s.phase_ns[FORWARD] for s in known),
        backward_ns=_median(s.phase_ns[BACKWARD] for s in known),
        optimizer_ns=_median(s.phase_ns[OPTIMIZER] for s in known),
        wait_roles=tuple(roles),
        wait_ns=tuple(round(sum(s.wait_ns[role] for s in known) / len(known)) for role in roles),
        memory_peak_nbytes=memory_peak_nbytes,
        routed_rows=_median(s.routed_rows for s in known),
    )


def _median(values: Iterable[float]) -> int:
    samples = list(values)
    return round(median(samples)) if samples else 0
