"""Time marks on the host or on the device's streams, with one interface.

A mark is an ``int`` that costs almost nothing and is converted to nanoseconds later.  On the host
it is nanoseconds already.  On a device it is the number of an event on the current stream, or
``NO_TIME`` if there was none; events are read when all have happened, so reading never blocks.
"""

from __future__ import annotations

import math
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any, Protocol

from ...calib.marks.step_marks import NO_TIME, STEP_STREAM, Issued

MAX_EVENTS = 65_536
"""Limit on existing events."""
REBASE_MS = 128.0
"""Age at which the reference is renewed: readings are float32 milliseconds, beyond this coarser
than 16 ns."""
_UNORDERED_NS = 1_000
"""Tolerance for a mark before the previous one of its stream, because of rounding."""
# Reading an event takes microseconds; the budget is checked after each slice.
_SLICE_EVENTS = 16


DeviceEvent = Any
"""``torch.cuda.Event``, of which ``record``, ``query`` and ``elapsed_time`` are used."""


class HostReadings:
    """Marks that are nanoseconds already, or events of a trace that is read later."""

    num_dropped = 0
    issued: Issued | None = None
    """None: no device follows the host."""

    def is_ready(self, end_s: float = math.inf) -> bool:
        """Return True."""
        return True

    def read(self, marks: array[int]) -> array[int]:
        """Return ``marks`` itself."""
        return marks

    def streams(self, marks: array[int]) -> array[int]:
        """Return an empty array: all marks are on one time line."""
        return array("h")


class EventPool:
    """Reusable events; at most ``MAX_EVENTS`` exist."""

    def __init__(self, make_event: Callable[[], DeviceEvent]) -> None:
        self._make_event = make_event
        self._free: list[DeviceEvent] = []
        self._num_remaining = MAX_EVENTS

    @property
    def num_available(self) -> int:
        """Events that can be taken before others are given back."""
        return len(self._free) + self._num_remaining

    def take(self) -> DeviceEvent | None:
        """Return a free event, or a new one; None at the limit."""
        if self._free:
            return self._free.pop()
        if self._num_remaining <= 0:
            return None
        self._num_remaining -= 1
        return self._make_event()

    def give(self, events: list[DeviceEvent]) -> None:
        """Return events whose times have been read, or are no longer needed."""
        self._free.extend(events)


class DeviceReadings:
    """Events of one step, each with the number of its stream.

    Times are relative to the first event, which is anchored on the host.  ``num_dropped`` counts
    the marks that got no event.
    """

    def __init__(
        self,
        pool: EventPool,
        anchor_ns: int,
        events: list[DeviceEvent],
        on: array[int],
        *,
        issued: Issued | None = None,
        num_dropped: int = 0,
        is_capturing: Callable[[], bool] = lambda: False,
    ) -> None:
        self.num_dropped = num_dropped
        self.issued = issued
        self._is_capturing = is_capturing
        self._pool = pool
        self._events = events
        self._on = on
        # Events of one stream happen in order: the last of each covers all before it.
        last = {stream: event for stream, event in zip(on, events, strict=True)}
        self._last = list(last.values())
        self._times = array("q")
        self._reference: DeviceEvent = events[0] if events else None
        self._newest = self._reference
        self._reference_ns = self._newest_ns = anchor_ns

    def is_ready(self, end_s: float = math.inf) -> bool:
        """Return True when the device has passed all events and all have been read.

        Reading stops at ``end_s`` of ``time.perf_counter`` and continues with the next call.
        """
        if self._is_capturing():
            return False  # a query would end the capture
        while self._last:
            if not self._last[-1].query():
                return False
            self._last.pop()
        while (done := len(self._times)) < len(self._events):
            if time.perf_counter() >= end_s:
                break
            stop = done + _SLICE_EVENTS
            for event, stream in zip(self._events[done:stop], self._on[done:stop], strict=True):
                self._times.append(self._time_ns(event, stream))
        return len(self._times) == len(self._events)

    def _time_ns(self, event: DeviceEvent, stream: int) -> int:
        time_ms = self._reference.elapsed_time(event)
        if abs(time_ms) > REBASE_MS and self._reference is not self._newest:
            self._reference, self._reference_ns = self._newest, self._newest_ns
            time_ms = self._reference.elapsed_time(event)
        if not math.isfinite(time_ms):
            return NO_TIME
        time_ns = self._reference_ns + round(time_ms * 1e6)
        if stream == STEP_STREAM:
            if time_ns < self._newest_ns - _UNORDERED_NS:
                return NO_TIME  # an event queued later cannot pass earlier: the reading is invalid
            self._newest, self._newest_ns = event, max(time_ns, self._newest_ns)
            return self._newest_ns
        return time_ns

    def read(self, marks: array[int]) -> array[int]:
        """Return ``marks`` in nanoseconds, after ``is_ready``; gives the events back to the pool.

        A mark whose reading is not finite, or lies before the previous mark on the step's own
        stream, has no time; the others have theirs.
        """
        times = self._times
        self.give_back()
        return array("q", [times[mark] if mark != NO_TIME else NO_TIME for mark in marks])

    def streams(self, marks: array[int]) -> array[int]:
        """Return the stream number of each mark."""
        return array("h", [self._on[mark] if mark != NO_TIME else STEP_STREAM for mark in marks])

    def settle(self) -> int:
        """Stop reading: unread events have no time; return the number of those read."""
        num_read = len(self._times)
        self._last = []
        self._times.extend([NO_TIME] * (len(self._events) - num_read))
        return num_read

    def give_back(self) -> None:
        """Release the events, read or not."""
        events, self._events, self._last = self._events, [], []
        self._times = array("q")
        self._pool.give(events)


Readings = HostReadings | DeviceReadings
"""The marks of one finished step, perhaps still pending; they are read once."""


class Stopwatch(Protocol):
    """Source of marks during one step at a time."""

    is_host: bool
    mark: Callable[[], int]

    @property
    def num_available(self) -> int:
        """Marks that the next step may have."""
        ...

    def is_of_step(self, stream: Any) -> bool:
        """Return True if a stream (None: the current one) is that of the step."""
        ...

    def mark_step_stream(self) -> int:
        """Return a mark on the step's own stream, whichever is current."""
        ...

    def begin_step(self) -> None:
        """Start a step; earlier marks are forgotten."""

    def end_step(self) -> Readings:
        """Return the readings of the step's marks."""
        ...


class HostStopwatch:
    """Marks of the host's monotonic clock; for training on CPU."""

    is_host = True
    num_available = sys.maxsize

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.mark = clock

    def is_of_step(self, stream: Any) -> bool:
        """Return True: the host's work is one time line."""
        return True

    def mark_step_stream(self) -> int:
        """Return a mark, like ``mark``."""
        return self.mark()

    def begin_step(self) -> None:
        """Do nothing."""

    def end_step(self) -> HostReadings:
        """Return readings that are ready."""
        return HostReadings()


class DeviceStopwatch:
    """Marks of events on the device's current stream; never synchronises.

    ``stream_key`` identifies the current stream cheaply, and ``current_stream`` returns the object
    that an event is recorded on; it is called once per step and stream.  ``is_capturing`` returns
    True during capture of a graph, when no event may be recorded or read.  ``clock`` is the host's,
    in nanoseconds: it is read before an event is recorded, so that no device is ahead of it.
    """

    is_host = False

    def __init__(
        self,
        make_event: Callable[[], DeviceEvent],
        *,
        stream_key: Callable[[], int] = lambda: 0,
        current_stream: Callable[[], Any] = lambda: None,
        is_capturing: Callable[[], bool] = lambda: False,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.clock = clock
        self.issued_ns = 0
        """Time of the latest mark, by that clock."""
        self._pool = EventPool(make_event)
        self.stream_key = stream_key
        self._current_stream = current_stream
        self.is_capturing = is_capturing
        self._streams: dict[int | None, tuple[int, Any]] = {}
        self._events: list[DeviceEvent] = []
        self._on = array("h")
        self._host_ns = array("q")
        self._num_dropped = 0
        self._anchor_ns = 0

    @property
    def num_available(self) -> int:
        """Marks that the next step may have: one event more is its reference."""
        return max(0, self._pool.num_available - 1)

    def begin_step(self) -> None:
        """Record the reference event, which is mark 0."""
        self._events, self._on, self._num_dropped = [], array("h"), 0
        self._host_ns = array("q")
        self._streams.clear()
        self.mark()
        self._anchor_ns = time.perf_counter_ns()

    def mark(self) -> int:
        """Record an event on the current stream and return its number in the step."""
        self.issued_ns = self.clock()
        if self.is_capturing():
            return self._no_mark()
        key = self.stream_key()
        known = self._streams.get(key)
        if known is None:
            known = self._streams[key] = len(self._streams), self._current_stream()
        return self._record(*known)

    def is_of_step(self, stream: Any) -> bool:
        """Return True if ``stream``, or the current one for None, is the one that the step began
        on."""
        key = self.stream_key() if stream is None else getattr(stream, "cuda_stream", None)
        return self._streams.get(key, (-1, None))[0] == STEP_STREAM

    def mark_step_stream(self) -> int:
        """Return a mark, like ``mark``, on the stream that the step began on, whichever is
        current."""
        self.issued_ns = self.clock()
        if self.is_capturing() or not self._streams:
            return self._no_mark()
        return self._record(*next(iter(self._streams.values())))

    def _record(self, number: int, stream: Any) -> int:
        event = self._pool.take()
        if event is None:
            return self._no_mark()
        event.record(stream)
        self._host_ns.append(self.issued_ns)
        self._on.append(number)
        self._events.append(event)
        return len(self._events) - 1

    def _no_mark(self) -> int:
        self._num_dropped += 1
        return NO_TIME

    def end_step(self) -> DeviceReadings:
        """Return readings that become ready when the device has passed the last mark of each
        stream."""
        readings = DeviceReadings(
            self._pool,
            self._anchor_ns,
            self._events,
            self._on,
            issued=self._issued(),
            num_dropped=self._num_dropped,
            is_capturing=self.is_capturing,
        )
        self._events, self._on, self._host_ns = [], array("h"), array("q")
        self._streams.clear()
        return readings

    def _issued(self) -> Issued:
        """Return the host's times and the device's progress, found by a few queries without
        waiting."""
        if self.is_capturing():
            return Issued(host_ns=self._host_ns)
        queried_ns = self.clock()
        low, late = 0, self._before(len(self._events), 0)
        if late <= 0 or self._events[late].query():
            return Issued(host_ns=self._host_ns)
        while late - low > 1:
            middle = (low + late) // 2
            number = self._before(middle + 1, low)
            if number > low and not self._events[number].query():
                late = number
            else:
                low = middle
        return Issued(host_ns=self._host_ns, late=late, queried_ns=queried_ns)

    def _before(self, number: int, least: int) -> int:
        """Return the last event of the step's stream before ``number`` and after ``least``, else
        ``least``."""
        number -= 1
        while number > least and self._on[number] != STEP_STREAM:
            number -= 1
        return max(number, least)
