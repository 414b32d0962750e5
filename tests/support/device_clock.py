"""Virtual time of a host and of its device's queues: what runs when, and what waits for what."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import deque
from typing import Any

from device_truth import HOST, OUTSIDE, Truth

LAUNCH_S = 1e-6
"""Host time of one launch."""
SLOW_LAUNCH = "FORERUN_TEST_LAUNCH_S"
"""Environment variable: host time of one launch on a slower host."""
MAX_IN_FLIGHT = 1024
"""Launches in the device's queue before the host has to wait."""
QUERY_S = 5e-7
"""Host time of one query, so that polling makes progress."""
Part = tuple[float, float, int]


class Line:
    """One queue of the device: its busy intervals and their causes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.busy_s = 0.0
        self._begins: list[float] = []
        self._parts: list[Part] = []

    def add(self, begin_s: float, end_s: float, cause: int) -> None:
        """Occupy the queue from ``begin_s`` to ``end_s``, after all its earlier work."""
        if end_s > begin_s:
            self._begins.append(begin_s)
            self._parts.append((begin_s, end_s, cause))
        self.busy_s = max(self.busy_s, end_s)

    def parts(self, begin_s: float, end_s: float) -> list[Part]:
        """Return parts that cover the time between; idle time has the cause ``HOST``."""
        parts: list[Part] = []
        at_s = begin_s
        for number in range(max(0, bisect_right(self._begins, begin_s) - 1), len(self._parts)):
            begun_s, done_s, cause = self._parts[number]
            if begun_s >= end_s:
                break
            if done_s <= at_s:
                continue
            if begun_s > at_s:
                parts.append((at_s, begun_s, HOST))
            parts.append((max(at_s, begun_s), min(done_s, end_s), cause))
            at_s = min(done_s, end_s)
        if at_s < end_s:
            parts.append((at_s, end_s, HOST))
        return parts


class Clock:
    """The host's time and the device's queues, and the truth about them.

    The host is ahead of the device, as it is in training, until it asks for a result.
    """

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.host_s = 0.0
        self.launch_s = float(os.environ.get(SLOW_LAUNCH) or LAUNCH_S)
        self.lines: list[Line] = []
        self._in_flight: deque[float] = deque()
        self.counts = dict.fromkeys(("records", "timed_records", "queries", "reads"), 0)
        self._lock = threading.RLock()

    def line(self) -> Line:
        """Return a new queue."""
        with self._lock:
            self.lines.append(Line(len(self.lines)))
            return self.lines[-1]

    def ready_s(self, line: Line) -> float:
        """Return when work queued on a line now would begin."""
        return max(self.host_s, line.busy_s)

    def launch(self, line: Line, duration_s: float, cause: int = OUTSIDE) -> tuple[float, float]:
        """Queue work and return its begin and end; the host waits if too much is in flight."""
        with self._lock:
            if len(self._in_flight) >= MAX_IN_FLIGHT:
                self.host_reaches(self._in_flight.popleft())
            self.host_s += self.launch_s
            begin_s = self.ready_s(line)
            end_s = begin_s + duration_s
            line.add(begin_s, end_s, cause)
            self._in_flight.append(end_s)
            return begin_s, end_s

    def stall(self, line: Line, until_s: float, source: Line, *, is_logged: bool = True) -> None:
        """Make later work on ``line`` wait for ``source`` until ``until_s``."""
        with self._lock:
            begin_s = self.ready_s(line)
            if until_s <= begin_s:
                return
            parts = source.parts(begin_s, until_s)
            for part in parts:
                line.add(*part)
            if is_logged:
                self.truth.add(
                    "stalls", stream=line.number, begin_s=begin_s, end_s=until_s, parts=parts
                )

    def host_reaches(self, time_s: float) -> None:
        """Advance the host's time to ``time_s`` if it is earlier."""
        self.host_s = max(self.host_s, time_s)

    def synchronize(self, line: Line | None = None) -> None:
        """Make the host wait for a queue, or for all."""
        for one in self.lines if line is None else (line,):
            self.host_reaches(one.busy_s)

    def count(self, name: str) -> None:
        """Increment one of ``counts``."""
        self.counts[name] += 1


class AttributePatches:
    """Replaced attributes and their previous values."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, bool, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> Any:
        """Replace an attribute and return its previous value, inherited or not."""
        is_defined = name in vars(owner)
        before = vars(owner).get(name, getattr(owner, name, None))
        self._before.append((owner, name, is_defined, before))
        setattr(owner, name, value)
        return before

    def restore(self) -> None:
        """Restore all attributes."""
        while self._before:
            owner, name, is_defined, before = self._before.pop()
            if is_defined:
                setattr(owner, name, before)
            else:
                delattr(owner, name)
