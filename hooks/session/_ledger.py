"""The running step, the gap before it, and the transfer of finished steps to the writer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ...calib.records.record_kinds import (
    CoverageRecord,
    PhaseRecord,
    StepFlag,
    StepRecord,
    WindowRecord,
)
from ..process.guard import Guard
from ..recording.flight_recorder import FlightWindow
from ..recording.window import StepPlan
from ..recording.writer import RecordWriter, WindowEnd

if TYPE_CHECKING:
    from ..sensors.step_log import StepLog
    from .instruments import Instruments

_log = logging.getLogger(__name__)
READ_FRAC = 0.003
"""Share of a step that its end spends on reading the events of hooked steps."""
LATE_READ_FRAC = 0.01
"""Share of a step for reading after the window's end, when nothing is measured and an answer is
due."""
LEAST_READ_S = 0.0002
"""Least reading time of short steps: a hundred events."""
MOST_LATE_STEPS, MOST_LATE_S = 5, 10.0
"""Steps and seconds after a window's end in which its events may be read, the longer of the two:
steps of 60 ms provide 0.6 ms each, and a hooked one of a Llama needs 2 ms.  Then unread marks are
dropped."""


@dataclass(slots=True)
class OpenStep:
    """The running step as known so far."""

    number: int
    plan: StepPlan
    start_ns: int
    gap_ns: int
    flags: set[StepFlag]
    num_faults: int
    excluded_ns: int = 0
    hook_ns: int = 0

    @property
    def sorted_flags(self) -> tuple[StepFlag, ...]:
        """The flags in a fixed order."""
        return tuple(sorted(self.flags, key=lambda flag: flag.value))

    def record(self, window: int, duration_ns: int, *, is_hooked: bool) -> StepRecord:
        """Return the finished step as a record of ``window``."""
        return StepRecord(
            step=self.number,
            window=window,
            start_ns=self.start_ns,
            duration_ns=duration_ns,
            gap_ns=self.gap_ns,
            is_hooked=is_hooked,
            flags=self.sorted_flags,
            hook_ns=self.hook_ns,
        )


@dataclass(slots=True)
class StepGap:
    """Evaluation, saves and probes between the end of one step and the begin of the next."""

    end_ns: int | None = None
    brackets: dict[str, tuple[int, int]] = field(default_factory=dict)

    def extend(self, name: str, start_ns: int, end_ns: int) -> None:
        """Add a bracket; brackets of one name are merged, from the first begin to the last end."""
        known = self.brackets.get(name, (start_ns, end_ns))
        self.brackets[name] = (min(known[0], start_ns), max(known[1], end_ns))

    def gap_ns(self, start_ns: int) -> int:
        """Return the time from the last step's end to ``start_ns`` without the brackets."""
        if self.end_ns is None:
            return 0
        gap_ns, covered_ns = start_ns - self.end_ns, self.end_ns
        for begin_ns, end_ns in sorted(self.brackets.values()):
            begin_ns = max(begin_ns, covered_ns)
            gap_ns -= max(0, end_ns - begin_ns)
            covered_ns = max(covered_ns, end_ns)
        return max(0, gap_ns)


class Ledger:
    """The training side's data about the open window; marks wait until they can be read.

    ``send_event`` is called once all records of a window are written.
    """

    def __init__(self, writer: RecordWriter, guard: Guard, send_event: Callable[..., None]) -> None:
        self._writer = writer
        self._guard = guard
        self._send_event = send_event
        self._pending: list[StepLog] = []
        self._ending: WindowEnd | None = None
        self._first: int | None = None
        self._num_dropped = 0
        self._num_dropped_before = 0
        self._num_late_steps, self._late_s = 0, 0.0
        self.last = 0
        self.window = 0

    @property
    def is_open(self) -> bool:
        """True from the first step after warm-up to the window's end."""
        return self._first is not None

    def add_step(self, record: StepRecord, *, is_warmup: bool) -> None:
        """Add a finished step of a window."""
        self.window, self.last = record.window, record.step
        if not is_warmup and self._first is None:
            self._first = record.step
        self._writer.put(record)

    def add_brackets(self, brackets: Mapping[str, tuple[int, int]], step: int) -> None:
        """Add evaluations, saves and probes after ``step``: begin and end, in nanoseconds."""
        for name, (start_ns, end_ns) in brackets.items():
            self._writer.put(
                PhaseRecord(
                    step=step,
                    window=self.window,
                    name=name,
                    microbatch=0,
                    start_ns=start_ns,
                    duration_ns=end_ns - start_ns,
                )
            )

    def send_window_event(self, event: str) -> None:
        """Send an event about the latest window."""
        self._send_event(event, window=self.window, last_step=self.last)

    def add_log(self, log: StepLog) -> None:
        """Add the marks of a hooked step."""
        self._pending.append(log)

    def end_window(self, instruments: Instruments | None) -> None:
        """End the window after its last step; does nothing if none is open."""
        if self._first is None:
            return
        self._ending = WindowEnd(
            record=WindowRecord(
                window=self.window,
                first_step=self._first,
                last_step=self.last,
                num_faults=self._guard.num_faults,
                num_dropped=0,
                memory_peak_nbytes=instruments.memory_peak_nbytes() if instruments else 0,
                device_memory_nbytes=instruments.device_memory_nbytes() if instruments else 0,
            ),
            coverage=instruments.coverage(self.window) if instruments else (),
            on_written=partial(
                self._send_event, "window_closed", window=self.window, last_step=self.last
            ),
            flight=instruments.flight.close_window() if instruments else FlightWindow(),
        )
        self._first = None
        self._num_late_steps, self._late_s = 0, 0.0

    def drain(self, *, step_s: float = math.inf) -> None:
        """Pass on the steps whose marks can be read by now, then the window's end.

        Reading takes a share of a step of ``step_s``; if that does not suffice within a few steps
        and seconds of the window's end, the rest is dropped and reported.
        """
        frac = READ_FRAC if self._ending is None else LATE_READ_FRAC
        self._read(time.perf_counter() + max(LEAST_READ_S, frac * step_s))
        if self._ending is None:
            return
        self._num_late_steps, self._late_s = self._num_late_steps + 1, self._late_s + step_s
        if self._num_late_steps > MOST_LATE_STEPS and self._late_s > MOST_LATE_S:
            self._drop_pending()
        if not self._pending:
            ending, self._ending = self._ending, None
            self._writer.put(replace(ending, record=self._counted(ending.record)))

    def _read(self, end_s: float) -> None:
        while self._pending:
            log = self._pending.pop(0)
            is_resolved = self._guard.protect(log.resolve)(end_s)
            if is_resolved is False:
                self._pending.insert(0, log)
                break
            if is_resolved is None:  # its marks cannot be read, but later ones can
                self._num_dropped += len(log.what)
                continue
            self._num_dropped += log.num_dropped
            self._writer.put(log)

    def _counted(self, record: WindowRecord) -> WindowRecord:
        """Return the window with the records dropped since the end of the previous one."""
        total = self._num_dropped + self._writer.num_dropped
        before, self._num_dropped_before = self._num_dropped_before, total
        return replace(record, num_dropped=total - before)

    def _drop_pending(self) -> None:
        count = len(self._pending)
        self.give_up()
        if self._ending is None or not count:
            return
        record = self._ending.record
        words = f"some of {count} hooked step{'s' * (count > 1)}: the device was not read in time"
        _log.warning("[forerun] window %d is without %s", record.window, words)
        remark = CoverageRecord.remark(record.window, words)
        self._ending = replace(self._ending, coverage=(*self._ending.coverage, remark))

    def give_up(self) -> None:
        """Drop and count the unread marks: waiting would synchronise."""
        for log in self._pending:
            is_of_use = self._guard.protect(log.settle)()
            self._num_dropped += log.num_dropped
            if is_of_use:
                self._writer.put(log)
        self._pending.clear()

    def forget(self) -> None:
        """Discard the open window, which does not end: the loop has begun anew."""
        self._pending.clear()
        self._first = self._ending = None
