"""A window of one rank of a large world: what of it goes into the file, and into the message.

Both are bounded.  The file of a rank lasts for the whole run: a window takes at most half of what
is left.  In a small world, where nothing is sent, windows are bounded in the same way once the file
has its first ``WHOLE_NBYTES``; their ends are written for ever.  Steps are in the file as they end,
so that they outlive a crash; all else is packed when the window closes, and the same packed lines
are sent.

Where not all of a window fits, whole steps are kept, and whole passes within them.  Ranks choose
for themselves and never talk, yet a transfer is only measured where all ranks of its group keep it.
So every choice is one of a nested row, ordered by the numbers of steps and passes alone: whatever a
rank with less room keeps, all others keep as well.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...calib.records import (
    CollectiveRecord,
    CoverageRecord,
    OperatorRecord,
    Packer,
    PhaseRecord,
    Record,
    RunRecord,
    StepRecord,
    WindowRecord,
    pack,
    to_dict,
)
from ...calib.workload import MESSAGE_NBYTES, PACKED_NBYTES, Recorded, RecordingPlan
from ..sensors import BACKWARD, FORWARD, StepLog
from .window_records import WindowRecords

ENDS_NBYTES = 6 << 10
"""Room for what is in every message: header, coverage, summary, the window's end."""
ASIDE_NBYTES = 12 << 10
"""Room for what is no part of a hooked step: steps, evaluations, traces."""
# A line has some hundred bytes: half a megabyte at most.
MAX_ASIDE = 4096
# Lines at a time, so that training gets the interpreter back in between.
_BATCH = 32
STEPS_WANTED = 4
"""Steps that share the room before passes are kept whole: medians need several."""
_ALWAYS = 64
"""More halvings than any step has passes."""
_PASSES = (FORWARD, BACKWARD)
_WEIGHT = re.compile(r'"stands_for": ([0-9.e+-]+)')
"""The part of a collective's line that says how many calls it stands for."""


def line_of(record: Record) -> str:
    """The record as a line of a file."""
    return json.dumps(to_dict(record)) + "\n"


def in_retention_order(ordinals: Iterable[int]) -> list[int]:
    """Ordinals of hooked steps, the first to be kept first: any beginning of it is spread evenly.

    >>> in_retention_order(range(10))
    [0, 8, 4, 2, 6, 1, 3, 5, 7, 9]
    """
    return sorted(ordinals, key=lambda n: (-_num_halvings(n), n))


def levels_of(samples: Sequence[int]) -> list[int]:
    """The highest level at which each pass is still kept, by its number in the order of passes.

    ``samples`` is that of the step's log.  Level 0 has all passes, level 1 those whose operators
    were timed, each further one half of the micro-batches before.

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
    """Kind of a transfer inside a pass: it stands for those like it in passes that are left out."""


class StepDetail:
    """The lines of one hooked step, each with the level up to which it is kept.

    Phases and what happens outside the passes are kept at every level.  ``records`` are all of the
    step; those that ``keeps`` refuses only tell where passes begin and end.
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
        """The level beyond which nothing more goes."""
        return max((level for level in self._levels if level < _ALWAYS), default=0) + 1

    def lines(self, level: int) -> list[str]:
        """What is kept at a level."""
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
        """Level of the pass that is open at a time; that of what is always kept outside of them."""
        return self._levels[self._index(at_ns)] if self._is_inside(at_ns) else _ALWAYS

    def _is_inside(self, at_ns: int) -> bool:
        index = self._index(at_ns)
        return index >= 0 and at_ns < self._ends[index]

    def _index(self, at_ns: int) -> int:
        return bisect_right(self._starts, at_ns) - 1


def _weighted(text: str, factor: float) -> str:
    return _WEIGHT.sub(lambda match: f'"stands_for": {float(match[1]) * factor:.6g}', text)


def pack_steps(packer: Packer, steps: Iterator[StepDetail], num_steps: int) -> int:
    """Put as many steps into the packer as fit, taken in keeping order; how many that are.

    The first one decides the level, such that ``STEPS_WANTED`` like it have room.  Where passes are
    left out there are no more steps than those: with less room there would be as many.
    """
    level, num_packed, num_wanted = -1, 0, max(1, min(num_steps, STEPS_WANTED))
    for step in steps:
        if level < 0:
            level = _fitting_level(step, packer.num_left * 9 // (10 * num_wanted))
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
    """How often a number can be halved without rest."""
    return (number & -number).bit_length() - 1 if number else _ALWAYS


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
        self._remaining_nbytes = PACKED_NBYTES if plan.is_small else plan.file_nbytes(rank) or 0
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
            buffer = self._steps if is_small else self._aside
            if len(buffer) < MAX_ASIDE:
                buffer.append(line)
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
        """Detail of the undisturbed steps, as many as fit; how many did not."""
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
        """Those of one step, none where it makes no sense: that costs no other step."""
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
        if self._part is not Recorded.GROUPS:
            return True
        return isinstance(record, CollectiveRecord) and not self._replica.isdisjoint(record.ranks)

    def _spend(self, nbytes: int) -> bool:
        if nbytes > self._remaining_nbytes:
            return False
        self._remaining_nbytes -= nbytes
        return True


def _pack_some(lines: list[str]) -> str:
    """The first of the lines as one, as many as have room; nothing where there is none."""
    packer = Packer(ASIDE_NBYTES)
    for start in range(0, len(lines), _BATCH):
        if not packer.add(lines[start : start + _BATCH]):
            break
    return packer.line() if lines else ""
