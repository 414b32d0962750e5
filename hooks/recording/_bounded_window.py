"""A window of one rank of a large world: what its file has room for, or its summary.

The file of a rank lasts for the whole run: a window takes at most half of the remaining space.  In
a small world windows are bounded in the same way once the file has its first ``WHOLE_NBYTES``;
window ends are always written.  Step records are written as the steps end, so that they survive a
crash; marks when the window closes.

If not all of a window fits, its first steps are retained.  Ranks choose independently, yet a
transfer is only measured if all ranks of its group retain it: all other ranks retain what a rank
with less space retains.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from ...calib.marks.marked_window import MarkedWindow
from ...calib.records.packed import Packer
from ...calib.records.record_kinds import (
    PhaseRecord,
    Record,
    RunRecord,
    StepRecord,
    to_dict,
)
from ...calib.workload.recording import PACKED_NBYTES, RecordingDetail, RecordingPlan

ENDS_NBYTES = 6 << 10
"""Space for what the steps of a window share: coverage, flight data, the window's end."""
ASIDE_NBYTES = 12 << 10
"""Space for records outside hooked steps at a time: evaluations, traces."""
# A line has about a hundred bytes: half a megabyte at most.
MAX_ASIDE = 4096
# Lines per call, so that training gets the interpreter in between.
_BATCH = 32


def line_of(record: Record) -> str:
    """Return the record as a line of a file."""
    return json.dumps(to_dict(record)) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedWindow:
    """Lines for the rank's own file, or its message if it has none."""

    lines: tuple[str, ...] = ()
    message: str = ""


class BoundedWindow:
    """Selects the records of one rank by its part in the plan, window after window.

    ``pace`` is called regularly, to let other threads run; ``on_fault`` for an inconsistent step.
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
        is_member = self._part is RecordingDetail.GROUPS
        self._shared_with = plan.replica if is_member else frozenset[int]()
        self._is_small = plan.is_small
        self._remaining_nbytes = PACKED_NBYTES if plan.is_small else plan.file_nbytes(rank) or 0
        self._aside: list[str] = []

    def takes(self, record: Record, line: str) -> bool:
        """Return True if the line is to be written to the file at once; others, but those of ranks
        without a file, are buffered for ``aside``."""
        if self._part is RecordingDetail.WATCH:
            return False
        if isinstance(record, StepRecord | PhaseRecord | RunRecord):
            return self.spend(len(line))
        if len(self._aside) < MAX_ASIDE:
            self._aside.append(line)
        return False

    def aside(self) -> str:
        """Return the records outside steps since the last call, packed for the file; may be
        empty."""
        lines, self._aside = self._aside, []
        packer = Packer(ASIDE_NBYTES)
        for start in range(0, len(lines), _BATCH):
            if not packer.add(lines[start : start + _BATCH]):
                break
        line = packer.line() if lines else ""
        return line if self.spend(len(line)) else ""

    def close(self, window: MarkedWindow) -> ClosedWindow:
        """Return the lines or the message of the closed window."""
        if self._part is RecordingDetail.WATCH:
            return ClosedWindow(message=self._summary(window))
        window.steps = [log for log in window.steps if log.step in window.step_ns]
        window.shared_with = self._shared_with
        aside = self.aside()
        line = window.to_line(self._on_fault, self._remaining_nbytes // 2 - ENDS_NBYTES)
        is_written = self.spend(len(line)) or self._is_small
        return ClosedWindow(lines=(aside, *([line] if is_written else [])))

    def _summary(self, window: MarkedWindow) -> str:
        """Return the message of a rank without a file; an inconsistent step is left out of it."""
        from ...calib.marks.window_records import WindowRecords

        made = WindowRecords(logs=window.steps, calls=window.calls, step_ns=window.step_ns)
        for log in window.steps:
            try:
                for _ in made.of(log):
                    self._pace()
            except Exception as err:
                self._on_fault(err)
                made.sums.pop(log.step, None)
        if window.end is None:
            return ""
        return json.dumps({**to_dict(made.summary(window.end)), "rank": self._rank}) + "\n"

    def spend(self, nbytes: int) -> bool:
        """Return True if the file has room for so many more bytes, which are then taken."""
        if nbytes > self._remaining_nbytes:
            return False
        self._remaining_nbytes -= nbytes
        return True
