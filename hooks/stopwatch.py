"""Time marks on the host or on the device's stream, with one interface.

A mark is an ``int`` that costs next to nothing to take and is turned into nanoseconds later.  On
the host it is nanoseconds already.  On a device it is the number of an event on the current
stream; events are read when all have happened, so reading can never block.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any, Protocol


class DeviceEvent(Protocol):
    """The part of ``torch.cuda.Event`` that is used."""

    def record(self) -> None:
        """Put the event on the current stream."""

    def query(self) -> bool:
        """True once the stream has passed it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to ``end_event``."""
        ...


class Readings(Protocol):
    """The marks of one finished step, perhaps still on their way."""

    def is_ready(self) -> bool:
        """True when ``read`` can be called without waiting."""
        ...

    def read(self, marks: array[int]) -> array[int]:
        """``marks`` in nanoseconds of the host's clock; to be called once."""
        ...


class Stopwatch(Protocol):
    """Takes marks during one step at a time."""

    is_host: bool
    mark: Callable[[], int]

    def begin_step(self) -> None:
        """Start a step; marks before it are forgotten."""

    def end_step(self) -> Readings:
        """What the step's marks will read."""
        ...


class HostReadings:
    """Marks that are nanoseconds already."""

    def is_ready(self) -> bool:
        """Always True."""
        return True

    def read(self, marks: array[int]) -> array[int]:
        """``marks`` itself."""
        return marks


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


class EventPool:
    """Events that have been read and can be recorded again; grows as needed."""

    def __init__(self, make_event: Callable[[], DeviceEvent]) -> None:
        self._make_event = make_event
        self._free: list[DeviceEvent] = []

    def take(self) -> DeviceEvent:
        """A free event, or a new one."""
        return self._free.pop() if self._free else self._make_event()

    def give(self, events: list[DeviceEvent]) -> None:
        """Return events whose times have been read."""
        self._free.extend(events)


class DeviceReadings:
    """Events of one step; times are relative to the first, which is anchored on the host."""

    def __init__(self, pool: EventPool, anchor_ns: int, events: list[DeviceEvent]) -> None:
        self._pool = pool
        self._anchor_ns = anchor_ns
        self._events = events

    def is_ready(self) -> bool:
        """True when the device has passed all events; asks, never waits."""
        # The last event alone is not enough: marks may lie on several streams.
        return all(event.query() for event in reversed(self._events))

    def read(self, marks: array[int]) -> array[int]:
        """``marks`` in nanoseconds; gives the events back to the pool."""
        elapsed = self._events[0].elapsed_time
        times = [self._anchor_ns + round(elapsed(event) * 1e6) for event in self._events]
        read = array("q", [times[mark] for mark in marks])
        self._pool.give(self._events)
        self._events = []
        return read


class DeviceStopwatch:
    """Marks of events on the device's current stream; never synchronises.

    ``is_capturing`` tells whether a graph is being captured, when no event may be recorded: then a
    mark repeats the one before.
    """

    is_host = False

    def __init__(
        self,
        make_event: Callable[[], DeviceEvent],
        *,
        is_capturing: Callable[[], bool] = lambda: False,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._pool = EventPool(make_event)
        self._is_capturing = is_capturing
        self._clock = clock
        self._events: list[DeviceEvent] = []
        self._anchor_ns = 0

    def begin_step(self) -> None:
        """Record the reference event, which is mark 0."""
        reference = self._pool.take()
        reference.record()
        self._anchor_ns = self._clock()
        self._events = [reference]

    def mark(self) -> int:
        """Record an event and return its number in the step."""
        if not self._is_capturing():
            event = self._pool.take()
            event.record()
            self._events.append(event)
        return len(self._events) - 1

    def end_step(self) -> DeviceReadings:
        """Readings that become ready when the device has passed the last mark."""
        readings = DeviceReadings(self._pool, self._anchor_ns, self._events)
        self._events = []
        return readings
