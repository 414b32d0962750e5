"""What a rank holds back until its window has closed, and the records that are then made of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from ...calib.records.rank_summary import StepSums, summarise
from ...calib.records.record_kinds import (
    CollectiveRecord,
    CoverageRecord,
    RankRecord,
    Record,
    StepRecord,
    WindowRecord,
)
from ..sensors.step_log import StepLog
from .attribution import Attribution
from .flight_recorder import FlightWindow
from .unseen_transfers import add_unseen


@dataclass(slots=True)
class WindowRecords:
    """Logs of the hooked steps of one window, and what is counted while records are made."""

    logs: list[StepLog] = field(default_factory=list)
    fired: dict[str, set[int]] = field(default_factory=dict)
    step_ns: dict[int, int] = field(default_factory=dict)
    sums: dict[int, StepSums] = field(default_factory=dict)
    num_dropped: int = 0
    """What a clock that jumped back has cost."""
    flight: FlightWindow = field(default_factory=FlightWindow)

    def note(self, record: Record) -> None:
        """Remember how long an undisturbed hooked step took."""
        if isinstance(record, StepRecord) and record.is_hooked and not record.flags:
            self.step_ns[record.step] = record.duration_ns

    def of(self, log: StepLog) -> Iterator[Record]:
        """The records of one step, counted as they are made."""
        known = len(log.transfer_kinds)
        unseen = add_unseen(log, self.flight)
        if len(log.transfer_kinds) > known:
            self.fired |= {name: {0} for name in self.flight.unseen_names}
        attribution = Attribution(log)
        sums = self.sums[log.step] = StepSums()
        has_transfers = False
        for record in self.flight.amend(chain(attribution.records(), unseen)):
            sums.add(record)
            has_transfers = has_transfers or isinstance(record, CollectiveRecord)
            yield record
        self.num_dropped += attribution.num_dropped
        for site, is_backward in attribution.fired:
            name = coverage_name(log.sites[site].kind.value, is_backward)
            self.fired.setdefault(name, set()).add(site)
        if log.phases:
            self.fired.setdefault("timers", set()).add(0)
        if has_transfers:
            self.fired.setdefault("collectives", set()).add(0)

    def counted(self, window: WindowRecord) -> WindowRecord:
        """The window's record with what was dropped while records were made."""
        return replace(window, num_dropped=window.num_dropped + self.num_dropped)

    def coverage(self, installed: tuple[CoverageRecord, ...]) -> Iterator[CoverageRecord]:
        """What was installed, with how much of it fired."""
        for known in installed:
            yield replace(known, fired=len(self.fired.get(known.name, ())))

    def summary(self, window: WindowRecord) -> RankRecord:
        """What every rank can send; complete once the records of all steps were made."""
        return summarise(window.window, self.step_ns, self.sums, window.memory_peak_nbytes)


def coverage_name(kind: str, is_backward: bool) -> str:
    """Name of an operator's forward or backward hooks in the coverage."""
    return f"{kind}:backward" if is_backward else kind
