"""What happens in a hooked step, as compact marks; ``attribution`` makes records of it later.

Everything here runs inside training: a mark is two appends to integer arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import get_ident
from typing import Any

import torch

from .step_log import BITS, MARKS_PER_SPAN, NO_SHAPE, NO_SPAN, NO_TRANSFER, Code, StepLog
from .stopwatch import DeviceStopwatch, Stopwatch

FORWARD = "forward-compute"
BACKWARD = "backward-compute"
OPTIMIZER = "optimizer"

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
    """Marks of the step that is being hooked; without one, every method returns at once."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self.log: StepLog | None = None
        self.is_in_exchange = False
        """True inside a transfer that calls no process group: what it calls is part of it."""
        self._thread = 0
        self._device: DeviceStopwatch | None = None

    def open(self, log: StepLog) -> StepLog:
        """Start to fill a step's log."""
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

        What another thread calls is no waiting of the training, and between the two appends of a
        mark it would put the arrays out of step.
        """
        return get_ident() == self._thread or _backward_pass() >= 0

    def close(self) -> StepLog | None:
        """End the step's log; late marks of it are ignored."""
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
        """A module's forward begins; number of the span, or -1 where it is not recorded."""
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
        """What came before was no part of that span: it begins now."""
        log = self.log
        if log is not None and number >= 0 and log.num_free_marks > 0:
            log.num_free_marks -= 1
            log.marks.append(self.stopwatch.mark())
            log.what.append(number << BITS)

    def end_span(
        self, number: int, at: int, raw_shape: tuple[Any, ...] | None, element_nbytes: int
    ) -> None:
        """The forward of that span ended at mark ``at``; the time since then was ours.

        The raw shape is what the canonical one will be computed from; None where there is none.
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
        """Our own time is none of a device's, unless it waits for the host."""
        device = self._device
        if device is not None:
            hook_times_ns = log.hook_times_ns
            if len(hook_times_ns) + 1 < len(log.what):
                hook_times_ns.extend([0] * (len(log.what) - 1 - len(hook_times_ns)))
            hook_times_ns.append(device.clock() - device.issued_ns)

    def mark_backward(self, log: StepLog, marks: Iterable[int]) -> None:
        """The autograd engine has reached a node where backward spans begin and end."""
        if log.is_open:
            now = self.stopwatch.mark()
            for what in marks:
                log.marks.append(now)
                log.what.append(what)
            self._end_mark(log)

    def begin_phase(self, name: str) -> None:
        """A bracket of the host framework begins."""
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
        """The latest open bracket of that name ends; does nothing where there is none."""
        log = self.log
        if log is None:
            return
        numbers = log.open_phases.get(name)
        if numbers:
            self._mark(log, numbers.pop() << BITS | _PHASE_END)
            if name in _PASSES:
                log.end_pass()

    def add_transfer(self, kind: int, nbytes: int) -> int:
        """Number of a new transfer; -1 where it is only counted or no step is hooked.

        ``kind`` is what ``StepLog.kind_number`` of the step has given.
        """
        return NO_TRANSFER if self.log is None else self.log.add_transfer(kind, nbytes)

    def begin_wait(self, transfer: int) -> None:
        """The rank begins to stand still for a transfer (in the call, or in its wait)."""
        log = self.log
        if log is not None and transfer >= 0:
            self._mark(log, transfer << BITS | _WAIT_BEGIN)

    def end_wait(self, transfer: int, *, is_done: bool = False) -> None:
        """The rank goes on; ``is_done`` says that a call has left no work to wait for."""
        log = self.log
        if log is not None and transfer >= 0:
            self._mark(log, transfer << BITS | (_CALL_DONE if is_done else _WAIT_END))

    def begin_pause(self) -> bool:
        """A framework does something of its own inside a pass; False where that is not timed."""
        log = self.log
        if log is None or not log.is_sampling:
            return False
        if log.num_free_marks < 2:
            log.refuse(1)
            return False
        self._mark(log, _PAUSE_BEGIN)
        return True

    def end_pause(self) -> None:
        """It is over."""
        if self.log is not None:
            self._mark(self.log, _PAUSE_END)

    def begin_stall(self) -> bool:
        """The step's stream begins to wait for another; False where that is not timed."""
        log = self.log
        if log is None or not log.has_transfers:
            return False
        if log.num_free_marks < 2:
            log.refuse(1)
            return False
        self._mark_step_stream(log, _STALL_BEGIN)
        return True

    def end_stall(self) -> None:
        """It goes on."""
        if self.log is not None:
            self._mark_step_stream(self.log, _STALL_END)

    def _mark_step_stream(self, log: StepLog, what: int) -> None:
        log.num_free_marks -= 1
        log.marks.append(self.stopwatch.mark_step_stream())
        log.what.append(what)


def around_mark(span: int) -> int:
    """The mark for a moment of the backward pass in which what is around ``span`` goes on."""
    return span << BITS | _ENCLOSING_RESUMED


def backward_mark(span: int, *, is_begin: bool) -> int:
    """The mark for the begin or the end of the backward pass of ``span``."""
    return span << BITS | (_BACKWARD_BEGIN if is_begin else _BACKWARD_END)
