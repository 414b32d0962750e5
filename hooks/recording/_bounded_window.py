"""A window of one rank of a large world: selection of records for the file and for the message.

Both are bounded.  The file of a rank lasts for the whole run: a window takes at most half of the
remaining space.  In a small world, where nothing is sent, windows are bounded in the same way once
the file has its first ``WHOLE_NBYTES``; window ends are always written.  Step records are written
as the steps end, so that they survive a crash; all else is packed when the window closes, and the
same packed lines are sent.

If not all of a window fits, whole steps are retained, and whole passes within them.  Ranks choose
independently, yet a transfer is only measured if all ranks of its group retain it.  So choices are
nested and depend on the numbers of steps and passes alone: all other ranks retain what a rank with
less space retains.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...calib.records.packed import Packer, pack
from ...calib.records.record_kinds import (
    CollectiveRecord,
    CoverageRecord,
    OperatorRecord,
    PhaseRecord,
    Record,
    RunRecord,
    StepRecord,
    WindowRecord,
    to_dict,
)
from ...calib.workload.recording import (
    MESSAGE_NBYTES,
    PACKED_NBYTES,
    RecordingDetail,
    RecordingPlan,
)
from ..sensors.recorder import BACKWARD, FORWARD
from ..sensors.step_log import StepLog
from .window_records import WindowRecords

ENDS_NBYTES = 6 << 10
"""Space for the parts of every message: header, coverage, summary, the window's end."""
ASIDE_NBYTES = 12 << 10
"""Space for records outside hooked steps: steps, evaluations, traces."""
# A line has about a hundred bytes: half a megabyte at most.
MAX_ASIDE = 4096
# Lines per call, so that training gets the interpreter in between.
_BATCH = 32
STEPS_WANTED = 4
"""Steps that share the space before passes are retained whole: medians need several."""
_ALWAYS = 64
"""More halvings than the number of passes in any step."""
_PASSES = (FORWARD, BACKWARD)
_WEIGHT = re.compile(r'"stands_for": ([0-9.e+-]+)')
"""Number of calls that a collective's line stands for."""


def line_of(record: Record) -> str:
    """Return the record as a line of a file."""
    return json.dumps(to_dict(record)) + "\n"


def in_retention_order(ordinals: Iterable[int]) -> list[int]:
    """Return ordinals of hooked steps by priority of retention; any prefix is spread evenly.

    >>> in_retention_order(range(10))
    [0, 8, 4, 2, 6, 1, 3, 5, 7, 9]
    """
    return sorted(ordinals, key=lambda n: (-_num_halvings(n), n))


def levels_of(samples: Sequence[int]) -> list[int]:
    """Return the highest level at which each pass is retained, in the order of passes.

    ``samples`` is that of the step's log.  Level 0 has all passes, level 1 those whose operators
    were timed, and each further level half of the micro-batches of the level before.

    >>> levels_of((0, -1, 2, -1, 4, -1, 6, -1))
    [64, 0, 1, 0, 2, 0, 1, 0]
    """
    timed = {number: i for i, number in enumerate(sorted({m for m in samples if m >= 0}))}
    return [_level(timed[m]) if m >= 0 else 0 for m in samples]


def _level(number: int) -> int:
    return 1 + _num_halvings(number) if number else _ALWAYS


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    level: int
    kind: str = ""
    """Kind of a transfer inside a pass; such a line also stands for those of omitted passes."""


class StepDetail:
    """The lines of one hooked step, each with the highest level at which it is retained.

    Phases and events outside the passes are retained at every level.  ``records`` are all of the
    step; those that ``keeps`` rejects only define where passes begin and end.
    """

    def __init__(
        self,
        records: Iterable[Record],
        samples: Sequence[int] = (),
        *,
        keeps: Callable[[Record], bool] = lambda record: True,
        pace: Callable[[], object] = lambda: None,
    ) -> None:
        known = list(records)
        phases = [r for r in known if isinstance(r, PhaseRecord) and r.name in _PASSES]
        phases.sort(key=lambda r: r.start_ns)
        self._starts = [r.start_ns for r in phases]
        self._ends = [r.start_ns + r.duration_ns for r in phases]
        levels = levels_of(samples)
        self._levels = [
            levels[r.microbatch % len(levels)] if levels else _level(r.microbatch) for r in phases
        ]
        self._lines = []
        for record in known:
            pace()
            if keeps(record):
                self._lines.append(self._line(record))

    @property
    def max_level(self) -> int:
        """Level beyond which nothing more is omitted."""
        return max((level for level in self._levels if level < _ALWAYS), default=0) + 1

    def lines(self, level: int) -> list[str]:
        """Return the lines retained at a level."""
        selected = [line for line in self._lines if line.level >= level]
        num_all = Counter(line.kind for line in self._lines)
        num_selected = Counter(line.kind for line in selected)
        out = []
        for line in selected:
            factor = num_all[line.kind] / num_selected[line.kind] if line.kind else 1.0
            out.append(line.text if factor == 1.0 else _weighted(line.text, factor))
        return out

    def _line(self, record: Record) -> _Line:
        level, kind = _ALWAYS, ""
        if isinstance(record, CollectiveRecord):
            level = self._home(record.issue_ns)
            if self._is_inside(record.issue_ns):
                kind = f"{record.collective.value} {record.group} {record.ranks} {record.peer}"
        elif isinstance(record, OperatorRecord):
            level = self._home(record.start_ns)
        return _Line(line_of(record), level, kind)

    def _home(self, at_ns: int) -> int:
        """Return the level of the pass that is open at a time; ``_ALWAYS`` outside of passes."""
        return self._levels[self._index(at_ns)] if self._is_inside(at_ns) else _ALWAYS

    def _is_inside(self, at_ns: int) -> bool:
        index = self._index(at_ns)
        return index >= 0 and at_ns < self._ends[index]

    def _index(self, at_ns: int) -> int:
        return bisect_right(self._starts, at_ns) - 1


def _weighted(text: str, factor: float) -> str:
    return _WEIGHT.sub(lambda match: f'"stands_for": {float(match[1]) * factor:.6g}', text)


def pack_steps(packer: Packer, steps: Iterator[StepDetail], num_steps: int) -> int:
    """Pack as many steps as fit, in order of retention; return their number.

    The first one determines the level, such that ``STEPS_WANTED`` like it fit.  If passes are
    omitted, no more steps than those are packed, since with less space there would be as many.
    """
    level, num_packed, num_wanted = -1, 0, max(1, min(num_steps, STEPS_WANTED))
    for step in steps:
        if level < 0:
            level = _fitting_level(step, packer.remaining_nbytes * 9 // (10 * num_wanted))
        if not packer.add(step.lines(level)):
            break
        num_packed += 1
        if level and num_packed == num_wanted:
            break
    return num_packed


def _fitting_level(step: StepDetail, nbytes: int) -> int:
    levels: Sequence[int] = range(step.max_level + 1)
    for level in levels:
        if Packer.compressed_nbytes(step.lines(level)) <= nbytes:
            return level
    return levels[-1]


def _num_halvings(number: int) -> int:
    """Return how often a number is divisible by two."""
    return (number & -number).bit_length() - 1 if number else _ALWAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedWindow:
    """Lines for the rank's own file, and the message, each within its limit."""

    lines: tuple[str, ...]
    message: str


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
        self._replica = plan.replica
        self._is_small = plan.is_small
        self._remaining_nbytes = PACKED_NBYTES if plan.is_small else plan.file_nbytes(rank) or 0
        self._steps: list[str] = []
        self._aside: list[str] = []
        self._sent_aside = ""

    def takes(self, record: Record, line: str) -> bool:
        """Return True if the line is to be written to the file at once.

        It is also buffered for the message or, if it is neither a step nor a bracket, for
        ``aside``.
        """
        if self._part is RecordingDetail.WATCH:
            return False
        is_small = isinstance(record, StepRecord | PhaseRecord)
        if not isinstance(record, RunRecord):
            buffer = self._steps if is_small else self._aside
            if len(buffer) < MAX_ASIDE:
                buffer.append(line)
        return (is_small or isinstance(record, RunRecord)) and self._spend(len(line))

    def aside(self) -> str:
        """Return the records outside steps since the last call, packed for the file; may be
        empty."""
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
        """Return the lines and the message of the closed window; ``header`` is that of the file."""
        if self._part is RecordingDetail.WATCH:
            for log in window.logs:
                self._records(window, log)
            summary = {**to_dict(window.summary(record)), "rank": self._rank}
            return ClosedWindow(lines=(), message=json.dumps(summary) + "\n")
        file_aside = self.aside()
        steps, aside = _pack_some(self._steps), self._sent_aside
        self._steps, self._sent_aside = [], ""
        budget_nbytes = MESSAGE_NBYTES - ENDS_NBYTES - len(steps) - len(aside)
        packer = Packer(min(budget_nbytes, self._remaining_nbytes // 2 - ENDS_NBYTES))
        num_omitted = self._pack(packer, window, record.first_step)
        details = packer.line()
        record = replace(window.counted(record), num_left_out=num_omitted)
        named = window.coverage(coverage, record)
        ends = pack(map(line_of, (*named, window.summary(record), record)))
        file_lines = [line for line in (details, ends) if self._spend(len(line))]
        if self._is_small and ends not in file_lines:
            file_lines.append(ends)
        return ClosedWindow(
            lines=(file_aside, *file_lines), message="".join((header, steps, aside, details, ends))
        )

    def _pack(self, packer: Packer, window: WindowRecords, first_step: int) -> int:
        """Pack details of as many undisturbed steps as fit; return the number of omitted steps."""
        by_ordinal: dict[int, list[StepLog]] = {}
        rest: list[StepLog] = []
        for log in window.logs:
            if log.step in window.step_ns:
                by_ordinal.setdefault(max(0, log.step - first_step) // 2, []).append(log)
            else:
                rest.append(log)
        ordered = [log for n in in_retention_order(by_ordinal) for log in by_ordinal[n]]
        remaining_logs = iter(ordered)
        details = (
            StepDetail(self._records(window, log), log.samples, keeps=self._keeps, pace=self._pace)
            for log in remaining_logs
        )
        num_packed = pack_steps(packer, details, len(ordered))
        for log in (*remaining_logs, *rest):
            self._records(window, log)
        return len(ordered) - num_packed

    def _records(self, window: WindowRecords, log: StepLog) -> list[Record]:
        """Return the records of one step; none if it is inconsistent, without affecting other
        steps."""
        records = []
        try:
            for record in window.of(log):
                records.append(record)
                self._pace()
        except Exception as err:
            self._on_fault(err)
            window.sums.pop(log.step, None)
            return []
        return records

    def _keeps(self, record: Record) -> bool:
        if self._part is not RecordingDetail.GROUPS:
            return True
        return isinstance(record, CollectiveRecord) and not self._replica.isdisjoint(record.ranks)

    def _spend(self, nbytes: int) -> bool:
        if nbytes > self._remaining_nbytes:
            return False
        self._remaining_nbytes -= nbytes
        return True


def _pack_some(lines: list[str]) -> str:
    """Return the first lines packed into one, as many as fit; empty if there are none."""
    packer = Packer(ASIDE_NBYTES)
    for start in range(0, len(lines), _BATCH):
        if not packer.add(lines[start : start + _BATCH]):
            break
    return packer.line() if lines else ""
