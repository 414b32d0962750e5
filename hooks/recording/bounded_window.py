"""A window of one rank of a large world: what of it goes into the file, and into the message.

Both are bounded.  The file of a rank lasts for the whole run: a window takes at most half of what
is left.  In a small world, where nothing is sent, windows are bounded in the same way once the file
has its first ``WHOLE_NBYTES``; their ends are written for ever.  Steps are in the file as they end,
so that they outlive a crash; all else is packed when the window closes, and the same packed lines
are sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...calib.records.packed import Packer, pack
from ...calib.records.record_kinds import (
    CollectiveRecord,
    CoverageRecord,
    PhaseRecord,
    Record,
    RunRecord,
    StepRecord,
    WindowRecord,
    to_dict,
)
from ...calib.workload.recording import MESSAGE_NBYTES, PACKED_NBYTES, Recorded, RecordingPlan
from ..sensors.step_log import StepLog
from .selection import StepDetail, in_keeping_order, line_of, pack_steps
from .window_records import WindowRecords

ENDS_NBYTES = 6 << 10
"""Room for what is in every message: header, coverage, summary, the window's end."""
ASIDE_NBYTES = 12 << 10
"""Room for what is no part of a hooked step: steps, evaluations, traces."""
# A line has some hundred bytes: half a megabyte at most.
MAX_ASIDE = 4096
# Lines at a time, so that training gets the interpreter back in between.
_BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedWindow:
    """Lines for the own file, and the message: each at most as long as it may be."""

    lines: tuple[str, ...]
    message: str


class BoundedWindow:
    """Sorts the records of one rank by its part in the plan, window after window.

    ``pace`` is called now and then, to let others run; ``on_fault`` where a step makes no sense.
    """

    def __init__(
        self,
        plan: RecordingPlan,
        rank: int,
        *,
        pace: Callable[[], object] = lambda: None,
        on_fault: Callable[[Exception], object] = lambda err: None,
    ) -> None:
        self._rank = rank
        self._pace, self._on_fault = pace, on_fault
        self._part = plan.part(rank)
        self._replica = plan.replica
        self._is_small = plan.is_small
        self._num_left = PACKED_NBYTES if plan.is_small else plan.file_nbytes(rank) or 0
        self._steps: list[str] = []
        self._aside: list[str] = []
        self._sent_aside = ""

    def takes(self, record: Record, line: str) -> bool:
        """True where the line goes into the file at once.

        It is kept for the message as well, or, where it is no step and no bracket, for ``aside``.
        """
        if self._part is Recorded.WATCH:
            return False
        is_small = isinstance(record, StepRecord | PhaseRecord)
        if not isinstance(record, RunRecord):
            held = self._steps if is_small else self._aside
            if len(held) < MAX_ASIDE:
                held.append(line)
        return (is_small or isinstance(record, RunRecord)) and self._spend(len(line))

    def aside(self) -> str:
        """What has come aside of steps since the last call, packed for the file; maybe nothing."""
        line, self._aside = _pack_some(self._aside), []
        if len(self._sent_aside) + len(line) <= ASIDE_NBYTES:
            self._sent_aside += line
        return line if self._spend(len(line)) else ""

    def close(
        self,
        window: WindowRecords,
        record: WindowRecord,
        coverage: tuple[CoverageRecord, ...],
        *,
        header: str,
    ) -> ClosedWindow:
        """The window has closed; ``header`` is that of the file."""
        if self._part is Recorded.WATCH:
            for log in window.logs:
                self._records(window, log)
            summary = {**to_dict(window.summary(record)), "rank": self._rank}
            return ClosedWindow(lines=(), message=json.dumps(summary) + "\n")
        own_aside = self.aside()
        steps, aside = _pack_some(self._steps), self._sent_aside
        self._steps, self._sent_aside = [], ""
        room = MESSAGE_NBYTES - ENDS_NBYTES - len(steps) - len(aside)
        packer = Packer(min(room, self._num_left // 2 - ENDS_NBYTES))
        num_left_out = self._pack(packer, window, record.first_step)
        details = packer.line()
        record = replace(window.counted(record), num_left_out=num_left_out)
        named = window.coverage(coverage, record)
        ends = pack(map(line_of, (*named, window.summary(record), record)))
        own = [line for line in (details, ends) if self._spend(len(line))]
        if self._is_small and ends not in own:
            own.append(ends)
        return ClosedWindow(
            lines=(own_aside, *own), message="".join((header, steps, aside, details, ends))
        )

    def _pack(self, packer: Packer, window: WindowRecords, first_step: int) -> int:
        """Detail of the undisturbed steps, as many as fit; how many did not."""
        by_ordinal: dict[int, list[StepLog]] = {}
        rest: list[StepLog] = []
        for log in window.logs:
            if log.step in window.step_ns:
                by_ordinal.setdefault(max(0, log.step - first_step) // 2, []).append(log)
            else:
                rest.append(log)
        ordered = [log for n in in_keeping_order(by_ordinal) for log in by_ordinal[n]]
        left = iter(ordered)
        details = (
            StepDetail(self._records(window, log), log.samples, keeps=self._keeps, pace=self._pace)
            for log in left
        )
        num_kept = pack_steps(packer, details, len(ordered))
        for log in (*left, *rest):
            self._records(window, log)
        return len(ordered) - num_kept

    def _records(self, window: WindowRecords, log: StepLog) -> list[Record]:
        """Those of one step, none where it makes no sense: that costs no other step."""
        found = []
        try:
            for record in window.of(log):
                found.append(record)
                self._pace()
        except Exception as err:
            self._on_fault(err)
            window.sums.pop(log.step, None)
            return []
        return found

    def _keeps(self, record: Record) -> bool:
        if self._part is not Recorded.GROUPS:
            return True
        return isinstance(record, CollectiveRecord) and not self._replica.isdisjoint(record.ranks)

    def _spend(self, nbytes: int) -> bool:
        if nbytes > self._num_left:
            return False
        self._num_left -= nbytes
        return True


def _pack_some(lines: list[str]) -> str:
    """The first of the lines as one, as many as have room; nothing where there is none."""
    packer = Packer(ASIDE_NBYTES)
    for start in range(0, len(lines), _BATCH):
        if not packer.add(lines[start : start + _BATCH]):
            break
    return packer.line() if lines else ""
