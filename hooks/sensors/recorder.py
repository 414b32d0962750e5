"""Recorder of a hooked step as compact marks; ``attribution`` makes records of them later.

Everything here runs inside training: a mark is two appends to integer arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import get_ident
from typing import Any

import torch

from ...calib.marks.step_marks import BITS, NO_SHAPE, NO_SPAN, Code
from ...calib.records.record_kinds import BACKWARD, FORWARD
from .step_log import MARKS_PER_SPAN, NO_TRANSFER, StepLog
from .stopwatch import DeviceStopwatch, Stopwatch

_backward_pass = getattr(torch._C, "_current_graph_task_id", lambda: 0)
_PASSES = frozenset({FORWARD, BACKWARD})
_SPAN_END = int(Code.SPAN_END)
_BACKWARD_BEGIN, _BACKWARD_END = int(Code.BACKWARD_BEGIN), int(Code.BACKWARD_END)
_WAIT_BEGIN, _WAIT_END, _CALL_DONE = int(Code.WAIT_BEGIN), int(Code.WAIT_END), int(Code.CALL_DONE)
_PHASE_BEGIN, _PHASE_END, _HOOK_END = map(int, (Code.PHASE_BEGIN, Code.PHASE_END, Code.HOOK_END))
_STALL_BEGIN, _STALL_END = int(Code.STALL_BEGIN), int(Code.STALL_END)
_PAUSE_BEGIN, _PAUSE_END = int(Code.PAUSE_BEGIN), int(Code.PAUSE_END)
_ENCLOSING_RESUMED = int(Code.ENCLOSING_RESUMED)


class Recorder:
    """Marks of the hooked step; without one, every method returns at once."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self.log: StepLog | None = None
        self.is_in_exchange = False
        """True inside a transfer that calls no process group: nested collectives are part of it."""
        self._thread = 0
        self._device: DeviceStopwatch | None = None

    def open(self, log: StepLog) -> StepLog:
        """Open a step's log."""
        watch = self.stopwatch
        self._device = watch if isinstance(watch, DeviceStopwatch) else None
        log.is_host = watch.is_host
        self.stopwatch.begin_step()
        self.is_in_exchange = False
        log.is_sampling = not log.samples
        self.log, self._thread = log, get_ident()
        return log

    @property
    def is_of_step(self) -> bool:
        """True on the thread that trains, and on those of autograd during its backward pass.

        Waits of other threads do not delay training, and their marks could come between the two
        appends of a mark and misalign the arrays.
        """
        return get_ident() == self._thread or _backward_pass() >= 0

    def close(self) -> StepLog | None:
        """Close the step's log; its late marks are ignored."""
        log, self.log = self.log, None
        if log is not None:
            log.is_open = False
            log.readings = self.stopwatch.end_step()
            log.num_dropped += log.readings.num_dropped
        return log

    def _mark(self, log: StepLog, what: int) -> None:
        if log.num_free_marks <= 0 or not log.is_open:
            if log.is_open:
                log.refuse(1)
            return
        log.num_free_marks -= 1
        log.marks.append(self.stopwatch.mark())
        log.what.append(what)

    def begin_span(self, site: int) -> int:
        """Begin a module's forward; return the number of the span, or -1 if it is not recorded."""
        log = self.log
        if log is None or not log.is_sampling:
            return NO_SPAN
        number = len(log.span_sites)
        if number >= log.max_spans or log.num_free_marks < MARKS_PER_SPAN:
            log.refuse(0)
            return NO_SPAN
        log.num_free_marks -= MARKS_PER_SPAN
        log.span_sites.append(site)
        log.span_shapes.append(NO_SHAPE)
        log.marks.append(self.stopwatch.mark())
        log.what.append(number << BITS)
        self._end_mark(log)
        return number

    def restart_span(self, number: int) -> None:
        """Restart a span: the work so far was not part of it."""
        log = self.log
        if log is not None and number >= 0 and log.num_free_marks > 0:
            log.num_free_marks -= 1
            log.marks.append(self.stopwatch.mark())
            log.what.append(number << BITS)

    def end_span(
        self, number: int, at: int, raw_shape: tuple[Any, ...] | None, element_nbytes: int
    ) -> None:
        """End the forward of a span at mark ``at``; the time since then was ours.

        The canonical shape will be computed from the raw shape; None if there is none.
        """
        log = self.log
        if log is None or number < 0:
            return
        log.marks.append(at)
        log.what.append(number << BITS | _SPAN_END)
        if raw_shape is not None:
            log.span_shapes[number] = log.shape_number((raw_shape, element_nbytes))
        if log.is_host:
            log.marks.append(self.stopwatch.mark())
            log.what.append(_HOOK_END)
        self._end_mark(log)

    def _end_mark(self, log: StepLog) -> None:
        """Log the time of our hook, which delays a device only if that waits for the host."""
        device = self._device
        if device is not None:
            hook_times_ns = log.hook_times_ns
            if len(hook_times_ns) + 1 < len(log.what):
                hook_times_ns.extend([0] * (len(log.what) - 1 - len(hook_times_ns)))
            hook_times_ns.append(device.clock() - device.issued_ns)

    def mark_backward(self, log: StepLog, marks: Iterable[int]) -> None:
        """Mark a node that the autograd engine has reached, where backward spans begin and end."""
        if log.is_open:
            now = self.stopwatch.mark()
            for what in marks:
                log.marks.append(now)
                log.what.append(what)
            self._end_mark(log)

    def begin_phase(self, name: str) -> None:
        """Begin a phase of the host framework."""
        log = self.log
        if log is None:
            return
        count = log.starts.get(name, 0)
        log.starts[name] = count + 1
        number = len(log.phases)
        if name in _PASSES:
            log.begin_pass(count, number, is_forward=name == FORWARD)
        log.phases.append((name, count))
        log.open_phases.setdefault(name, []).append(number)
        self._mark(log, number << BITS | _PHASE_BEGIN)

    def end_phase(self, name: str) -> None:
        """End the latest open phase of that name, if there is one."""
        log = self.log
        if log is None:
            return
        numbers = log.open_phases.get(name)
        if numbers:
            self._mark(log, numbers.pop() << BITS | _PHASE_END)
            if name in _PASSES:
                log.end_pass()

    def add_transfer(self, kind: int, nbytes: int) -> int:
        """Return the number of a new transfer; -1 if it is only counted or no step is hooked.

        ``kind`` is a result of the step's ``StepLog.kind_number``.
        """
        return NO_TRANSFER if self.log is None else self.log.add_transfer(kind, nbytes)

    def begin_wait(self, transfer: int) -> None:
        """Mark the begin of waiting for a transfer (in the call, or in its wait)."""
        log = self.log
        if log is not None and transfer >= 0:
            self._mark(log, transfer << BITS | _WAIT_BEGIN)

    def end_wait(self, transfer: int, *, is_done: bool = False) -> None:
        """Mark the end of waiting; ``is_done`` if a call has left no work to wait for."""
        log = self.log
        if log is not None and transfer >= 0:
            self._mark(log, transfer << BITS | (_CALL_DONE if is_done else _WAIT_END))

    def begin_pause(self) -> bool:
        """Begin a framework's own work inside a pass; False if that is not timed."""
        log = self.log
        if log is None or not log.is_sampling:
            return False
        if log.num_free_marks < 2:
            log.refuse(1)
            return False
        self._mark(log, _PAUSE_BEGIN)
        return True

    def end_pause(self) -> None:
        """End the framework's own work."""
        if self.log is not None:
            self._mark(self.log, _PAUSE_END)

    def begin_stall(self) -> bool:
        """Mark that the step's stream begins to wait for another; False if that is not timed."""
        log = self.log
        if log is None or not log.has_transfers:
            return False
        if log.num_free_marks < 2:
            log.refuse(1)
            return False
        self._mark_step_stream(log, _STALL_BEGIN)
        return True

    def end_stall(self) -> None:
        """Mark that the step's stream continues."""
        if self.log is not None:
            self._mark_step_stream(self.log, _STALL_END)

    def _mark_step_stream(self, log: StepLog, what: int) -> None:
        log.num_free_marks -= 1
        log.marks.append(self.stopwatch.mark_step_stream())
        log.what.append(what)


def around_mark(span: int) -> int:
    """Return the mark for a moment of the backward pass in which the work around ``span``
    resumes."""
    return span << BITS | _ENCLOSING_RESUMED


def backward_mark(span: int, *, is_begin: bool) -> int:
    """Return the mark for the begin or the end of the backward pass of ``span``."""
    return span << BITS | (_BACKWARD_BEGIN if is_begin else _BACKWARD_END)
