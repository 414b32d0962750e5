"""Time marks on the host or on the device's stream, with one interface.

A mark is an ``int`` that costs next to nothing to take and is turned into nanoseconds later.  On
the host it is nanoseconds already.  On a device it is the number of an event on the current
stream; events are read when all have happened, so reading can never block.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

MAX_EVENTS = 65_536
"""Events that exist at once; without a free one a mark repeats the one before, and is counted."""
SLICE_S = 0.001
"""Time that one step's end gives to reading events."""
# Reading an event takes microseconds; the budget is looked at after each slice.
_SLICE_EVENTS = 64


DeviceEvent = Any
"""``torch.cuda.Event``, of which ``record``, ``query`` and ``elapsed_time`` are used."""


class HostReadings:
    """Marks that are nanoseconds already, or places in a sequence of times in nanoseconds."""

    num_dropped = 0

    def __init__(self, times_ns: Sequence[int] | None = None) -> None:
        self._times_ns = times_ns

    def is_ready(self) -> bool:
        """Always True."""
        return True

    def read(self, marks: array[int]) -> array[int]:
        """``marks`` itself, or the times of ``marks``."""
        if self._times_ns is None:
            return marks
        return array("q", [self._times_ns[mark] for mark in marks])


class EventPool:
    """Events that have been read and can be recorded again; at most ``MAX_EVENTS`` exist."""

    def __init__(self, make_event: Callable[[], DeviceEvent]) -> None:
        self._make_event = make_event
        self._free: list[DeviceEvent] = []
        self._num_left = MAX_EVENTS

    def take(self) -> DeviceEvent | None:
        """A free event, or a new one; None where there are enough already."""
        if self._free:
            return self._free.pop()
        if self._num_left <= 0:
            return None
        self._num_left -= 1
        return self._make_event()

    def give(self, events: list[DeviceEvent]) -> None:
        """Return events whose times have been read."""
        self._free.extend(events)


class DeviceReadings:
    """Events of one step; times are relative to the first, which is anchored on the host."""

    def __init__(
        self,
        pool: EventPool,
        anchor_ns: int,
        events: list[DeviceEvent],
        last: Sequence[DeviceEvent],
        *,
        num_dropped: int = 0,
    ) -> None:
        self.num_dropped = num_dropped
        self._pool = pool
        self._anchor_ns = anchor_ns
        self._events = events
        self._last = list(last)
        self._times: array[float] = array("d")

    def is_ready(self) -> bool:
        """True when the device has passed all events and all have been read, a slice per call."""
        # Events of one stream happen in order: the last of each stream stands for all before it.
        while self._last:
            if not self._last[-1].query():
                return False
            self._last.pop()
        end_s = time.perf_counter() + SLICE_S
        while (done := len(self._times)) < len(self._events):
            elapsed = self._events[0].elapsed_time
            self._times.extend(map(elapsed, self._events[done : done + _SLICE_EVENTS]))
            if time.perf_counter() >= end_s:
                break
        return len(self._times) == len(self._events)

    def read(self, marks: array[int]) -> array[int] | None:
        """``marks`` in nanoseconds, after ``is_ready``; gives the events back to the pool.

        None where a time is no number or lies before the reference: the device's clock has failed.
        """
        times, events = self._times, self._events
        self._times, self._events = array("d"), []
        self._pool.give(events)
        if not times or not all(map(math.isfinite, times)) or min(times) < 0.0:
            return None
        read = array("q", [self._anchor_ns + round(time_ms * 1e6) for time_ms in times])
        return array("q", [read[mark] for mark in marks])


Readings = HostReadings | DeviceReadings
"""The marks of one finished step, perhaps still on their way; they are read once."""


class Stopwatch(Protocol):
    """Takes marks during one step at a time."""

    is_host: bool
    mark: Callable[[], int]

    def begin_step(self) -> None:
        """Start a step; marks before it are forgotten."""

    def end_step(self) -> Readings:
        """What the step's marks will read."""
        ...


class HostStopwatch:
    """Marks of the host's monotonic clock; for training on CPU."""

    is_host = True

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.mark = clock

    def begin_step(self) -> None:
        """Nothing to prepare."""

    def end_step(self) -> HostReadings:
        """Readings that are ready."""
        return HostReadings()


class DeviceStopwatch:
    """Marks of events on the device's current stream; never synchronises.

    ``stream_key`` names the current stream cheaply, and ``current_stream`` makes the object that an
    event is recorded on; it is asked once per step and stream.  Without them every event is asked.
    ``is_capturing`` tells whether a graph is being captured, when no event may be recorded: then a
    mark repeats the one before.
    """

    is_host = False

    def __init__(
        self,
        make_event: Callable[[], DeviceEvent],
        *,
        stream_key: Callable[[], int] | None = None,
        current_stream: Callable[[], Any] = lambda: None,
        is_capturing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pool = EventPool(make_event)
        self._stream_key = stream_key
        self._current_stream = current_stream
        self._is_capturing = is_capturing
        self._streams: dict[int, Any] = {}
        self._last: dict[int, DeviceEvent] = {}
        self._events: list[DeviceEvent] = []
        self._num_dropped = 0
        self._anchor_ns = 0

    def begin_step(self) -> None:
        """Record the reference event, which is mark 0."""
        self._events, self._num_dropped = [], 0
        self._streams.clear()
        self._last.clear()
        self._record()
        self._anchor_ns = time.perf_counter_ns()

    def mark(self) -> int:
        """Record an event and return its number in the step."""
        if not self._is_capturing():
            self._record()
        return max(0, len(self._events) - 1)

    def _record(self) -> None:
        event = self._pool.take()
        if event is None:
            self._num_dropped += 1
            return
        if self._stream_key is None:
            key = len(self._events)
            event.record()
        else:
            key = self._stream_key()
            stream = self._streams.get(key)
            if stream is None:
                stream = self._streams[key] = self._current_stream()
            event.record(stream)
        self._last[key] = event
        self._events.append(event)

    def end_step(self) -> DeviceReadings:
        """Readings that become ready when the device has passed the last mark of each stream."""
        readings = DeviceReadings(
            self._pool,
            self._anchor_ns,
            self._events,
            tuple(self._last.values()),
            num_dropped=self._num_dropped,
        )
        self._events = []
        return readings
