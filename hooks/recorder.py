"""What happens in a hooked step, as compact marks; ``attribution`` makes records of it later.

Everything here runs inside training: a mark is two appends to integer arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from ..calib.workload.collectives import Collective, GroupRole
from ..calib.workload.operators import OperatorKind
from .stopwatch import Readings, Stopwatch

MAX_MARKS = 400_000
"""Marks kept per step, 16 bytes each; later ones are dropped and counted."""
NO_PARENT = -1
FORWARD = "forward-compute"
BACKWARD = "backward-compute"
OPTIMIZER = "optimizer"
UNKNOWN_TRANSFER = 0
"""Number under which waiting for a call that was made before the step is marked."""


class Code(IntEnum):
    """What a mark means; the number beside it says of which span, transfer or phase."""

    SPAN_BEGIN = 0
    SPAN_END = 1
    WAIT_BEGIN = 2
    WAIT_END = 3
    PHASE_BEGIN = 4
    PHASE_END = 5
    HOOK_END = 6  # the time since the mark before was our own


_PASSES = frozenset({FORWARD, BACKWARD})
_BITS = 3
_SPAN_BEGIN, _SPAN_END, _WAIT_BEGIN, _WAIT_END, _PHASE_BEGIN, _PHASE_END, _HOOK_END = map(int, Code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place in the model that is hooked; ``layer`` is 0 outside the transformer layers."""

    kind: OperatorKind
    layer: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A collective as it was called, without its times."""

    collective: Collective
    role: GroupRole
    group: str
    ranks: tuple[int, ...]
    nbytes: int
    sequence: int
    peer: int = -1


@dataclass(slots=True, kw_only=True)
class StepLog:
    """The marks of one step.  ``spans[i]`` is ``[site, parent, raw shape, element_nbytes]``.

    A backward span has its forward span's number as ``parent`` and None as site.  Every
    ``stride``-th pass has spans, ``offset`` shifts which; phases and transfers are complete.
    """

    step: int
    window: int
    sites: tuple[Site, ...]
    num_parameters: int = 0
    stride: int = 1
    offset: int = 0
    is_sampling: bool = True
    what: array[int] = field(default_factory=lambda: array("q"))
    marks: array[int] = field(default_factory=lambda: array("q"))
    spans: list[list[Any]] = field(default_factory=list)
    stack: list[int] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)
    open_phases: dict[str, list[int]] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    transfers: list[Transfer | None] = field(default_factory=lambda: [None])
    sequences: dict[tuple[str, Collective, int], int] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    num_dropped: int = 0
    is_open: bool = True
    readings: Readings | None = None

    def resolve(self) -> bool:
        """Turn marks into nanoseconds where that is possible without waiting; True when done."""
        if self.readings is None:
            return True
        if not self.readings.is_ready():
            return False
        self.marks = self.readings.read(self.marks)
        self.readings = None
        return True


class Recorder:
    """Marks of the step that is being hooked; without one, every method returns at once."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self.log: StepLog | None = None

    def open(self, log: StepLog) -> StepLog:
        """Start to fill a step's log."""
        self.stopwatch.begin_step()
        log.is_sampling = log.stride == 1
        self.log = log
        return log

    def close(self) -> StepLog | None:
        """End the step's log; late marks of it are ignored."""
        log, self.log = self.log, None
        if log is not None:
            log.is_open = False
            log.readings = self.stopwatch.end_step()
        return log

    def _mark(self, log: StepLog, what: int) -> None:
        if len(log.what) >= MAX_MARKS or not log.is_open:
            log.num_dropped += log.is_open
            return
        log.marks.append(self.stopwatch.mark())
        log.what.append(what)

    def begin_span(self, site: int) -> None:
        """A module's forward begins."""
        log = self.log
        if log is None or not log.is_sampling:
            return
        number = len(log.spans)
        log.spans.append([site, log.stack[-1] if log.stack else NO_PARENT, None, 0])
        log.stack.append(number)
        self._mark(log, number << _BITS | _SPAN_BEGIN)

    def end_span(self, site: int) -> int:
        """A module's forward has ended; its number, or -1 where it never began."""
        log = self.log
        if log is None or not log.is_sampling:
            return -1
        stack = log.stack
        while stack:
            number = stack.pop()
            if log.spans[number][0] == site:
                self._mark(log, number << _BITS | _SPAN_END)
                return number
        return -1

    def describe_span(self, number: int, raw_shape: tuple[Any, ...], element_nbytes: int) -> None:
        """Keep what the canonical shape will be computed from."""
        if self.log is not None:
            self.log.spans[number][2:] = raw_shape, element_nbytes

    def add_backward(self, forward: int) -> int:
        """A span for the backward pass of span ``forward``; its marks follow."""
        log = self.log
        if log is None:
            return -1
        log.spans.append([None, forward, None, 0])
        return len(log.spans) - 1

    def mark_backward(self, log: StepLog, marks: Iterable[int]) -> None:
        """The autograd engine has reached a node where backward spans begin and end."""
        if not log.is_open or len(log.what) >= MAX_MARKS:
            log.num_dropped += log.is_open
            return
        now = self.stopwatch.mark()
        for what in marks:
            log.marks.append(now)
            log.what.append(what)

    def end_hook(self) -> None:
        """The time since the last mark was ours; on a device it took none of the stream's."""
        if self.log is not None and self.stopwatch.is_host:
            self._mark(self.log, _HOOK_END)

    def begin_phase(self, name: str) -> None:
        """A bracket of the host framework begins."""
        log = self.log
        if log is None:
            return
        count = log.starts.get(name, 0)
        log.starts[name] = count + 1
        if name in _PASSES and log.stride > 1:
            log.is_sampling = (count + log.offset) % log.stride == 0
        number = len(log.phases)
        log.phases.append((name, count))
        log.open_phases.setdefault(name, []).append(number)
        self._mark(log, number << _BITS | _PHASE_BEGIN)

    def end_phase(self, name: str) -> None:
        """The latest open bracket of that name ends; does nothing where there is none."""
        log = self.log
        if log is None:
            return
        numbers = log.open_phases.get(name)
        if numbers:
            self._mark(log, numbers.pop() << _BITS | _PHASE_END)
            if name in _PASSES:
                log.is_sampling = log.stride == 1

    def add_transfer(
        self,
        *,
        collective: Collective,
        role: GroupRole,
        group: str,
        ranks: tuple[int, ...],
        nbytes: int,
        peer: int,
    ) -> int:
        """Number of a new transfer, 0 where no step is hooked."""
        log = self.log
        if log is None:
            return UNKNOWN_TRANSFER
        key = (group, collective, peer)
        sequence = log.sequences.get(key, 0)
        log.sequences[key] = sequence + 1
        log.transfers.append(
            Transfer(
                collective=collective,
                role=role,
                group=group,
                ranks=ranks,
                nbytes=nbytes,
                sequence=sequence,
                peer=peer,
            )
        )
        return len(log.transfers) - 1

    def begin_wait(self, transfer: int) -> None:
        """The rank begins to stand still for a transfer (in the call, or in its wait)."""
        if self.log is not None:
            self._mark(self.log, transfer << _BITS | _WAIT_BEGIN)

    def end_wait(self, transfer: int) -> None:
        """The rank goes on."""
        if self.log is not None:
            self._mark(self.log, transfer << _BITS | _WAIT_END)


def backward_mark(number: int, *, is_begin: bool) -> int:
    """The mark for the begin or the end of backward span ``number``."""
    return number << _BITS | (_SPAN_BEGIN if is_begin else _SPAN_END)


def split(what: int) -> tuple[int, int]:
    """Code and number of a mark."""
    return what & (1 << _BITS) - 1, what >> _BITS
