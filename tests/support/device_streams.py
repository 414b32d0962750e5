"""Streams, events and captures over a virtual clock, under the names of ``torch.cuda``.

Waiting is implemented as in ``torch/cuda/streams.py``: ``wait_stream`` records an event, and
``wait_event`` is ``Event.wait``.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from device_clock import QUERY_S, Clock, Line

from forerun.hooks.sensors.stopwatch import DeviceStopwatch

READ_S = 2e-6
"""Least real time that reading two events takes the host."""
_PER_STREAM = 16
_CPU = torch.device("cpu")


class Device:
    """Streams of one process: the current one of each thread, and the capture in progress."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.capture: Capture | None = None
        self._threads = threading.local()
        self.default = Stream.of(self, clock.line())

    @property
    def current(self) -> Stream:
        """Stream on which this thread queues work."""
        return getattr(self._threads, "stream", self.default)

    @current.setter
    def current(self, stream: Stream) -> None:
        self._threads.stream = stream

    @property
    def line(self) -> Line:
        """Queue of the current stream."""
        return self.current.line

    @property
    def thread(self) -> int:
        """Id of the running thread, or of the thread that it acts for."""
        return getattr(self._threads, "acts_for", threading.get_ident())

    @thread.setter
    def thread(self, ident: int) -> None:
        self._threads.acts_for = ident

    def exchange_mode(self, mode: int) -> int:
        """Stand in for ``cudaThreadExchangeStreamCaptureMode``: 0 global, 1 thread, 2 relaxed."""
        before = getattr(self._threads, "mode", 0)
        self._threads.mode = mode
        return before

    def is_capturing(self) -> bool:
        """Return True on the thread that captures."""
        return self.capture is not None and self.capture.thread == self.thread

    def forbid(self, action: str, *, is_of_thread: bool) -> None:
        """Raise if a capture does not allow ``action``, and invalidate that capture.

        ``is_of_thread``: forbidden only on the thread that captures.
        """
        capture = self.capture
        if capture is None or capture.mode == "relaxed":
            return
        is_mine = capture.thread == self.thread
        is_global = capture.mode == "global" and getattr(self._threads, "mode", 0) == 0
        if is_mine or (is_global and not is_of_thread):
            capture.invalidated_by = capture.invalidated_by or action
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing"
                               f" ({action})")  # fmt: skip


_installed: list[Device] = []


def device() -> Device:
    """Return the installed device."""
    return _installed[-1]


def install_device(one: Device) -> None:
    """Create new streams and events on this device from now on."""
    _installed.append(one)


def uninstall_device() -> None:
    """Reinstall the previous device."""
    _installed.pop()


def stopwatch_on(one: Device) -> DeviceStopwatch:
    """Return the stopwatch of hooks on a device whose host's clock is its own."""
    return DeviceStopwatch(
        lambda: Event(enable_timing=True),
        stream_key=lambda: one.current.cuda_stream,
        current_stream=lambda: one.current,
        clock=lambda: round(one.clock.host_s * 1e9),
    )


class Stream:
    """Queue of the device; ``cuda_stream`` identifies it, and is 0 for the default."""

    device = _CPU
    device_index = 0
    device_type = 1

    def __init__(self, device_: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority
        self._begin(device(), device().clock.line())

    @classmethod
    def of(cls, owner: Device, line: Line) -> Stream:
        """Return the stream of an existing queue."""
        stream = object.__new__(cls)
        stream.priority = 0
        stream._begin(owner, line)
        return stream

    def _begin(self, owner: Device, line: Line) -> None:
        self.line, self.owner = line, owner
        self.cuda_stream = self.stream_id = line.number * _PER_STREAM
        self._before: list[Stream] = []

    def wait_event(self, event: Any) -> None:
        """Make later work of this stream wait for the event."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Make later work of this stream wait for the present work of the other."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        """Record ``event``, or a new one, and return it."""
        if event is None:
            event = torch.cuda.Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return True if all queued work has ended by the host's time."""
        self.owner.forbid("Stream.query", is_of_thread=False)
        self.owner.clock.host_s += QUERY_S
        return self.owner.clock.host_s >= self.line.busy_s

    def synchronize(self) -> None:
        """Make the host wait for all queued work."""
        self.owner.forbid("Stream.synchronize", is_of_thread=False)
        self.owner.clock.synchronize(self.line)

    def is_capturing(self) -> bool:
        """Return True if this thread captures a graph."""
        return self.owner.is_capturing()

    def __enter__(self) -> Stream:
        self._before.append(self.owner.current)
        self.owner.current = self
        return self

    def __exit__(self, *_: Any) -> None:
        self.owner.current = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __repr__(self) -> str:
        return f"<stream {self.cuda_stream:#x} of a timeline>"


class StreamContext:
    """Stand-in for ``torch.cuda.stream``; reentrant."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before.append(device().current)
        if self.stream is not None:
            device().current = self.stream

    def __exit__(self, *_: Any) -> None:
        device().current = self._before.pop()


class Event:
    """Point in a stream, which the host learns of late and reads in single precision."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
        **_: Any,
    ) -> None:
        self.enable_timing, self.external = enable_timing, external
        self.time_s: float | None = None
        self.line: Line | None = None
        self.device = _CPU

    @property
    def cuda_event(self) -> int:
        """Unique number once it is recorded, else 0."""
        return id(self) if self.time_s is not None else 0

    def record(self, stream: Any = None) -> None:
        """Place the event after all work that is queued on the stream now."""
        if stream is None:
            stream = torch.cuda.current_stream()
        if self.enable_timing and not self.external and device().is_capturing():
            device().forbid("Event.record", is_of_thread=True)
        clock = device().clock
        clock.count("records")
        if self.enable_timing:
            clock.count("timed_records")
        self.line = stream.line
        self.time_s = clock.ready_s(stream.line)

    def wait(self, stream: Any = None) -> None:
        """Make later work of the stream wait for it."""
        if stream is None:
            stream = torch.cuda.current_stream()
        if self.time_s is not None and self.line is not None:
            device().clock.stall(stream.line, self.time_s, self.line)

    def query(self) -> bool:
        """Return True if it has happened by the host's time or was never recorded."""
        device().forbid("Event.query", is_of_thread=False)
        clock = device().clock
        clock.count("queries")
        clock.host_s += QUERY_S
        return self.time_s is None or clock.host_s >= self.time_s

    def synchronize(self) -> None:
        """Make the host wait for it."""
        device().forbid("Event.synchronize", is_of_thread=False)
        if self.time_s is not None:
            device().clock.host_reaches(self.time_s)

    def elapsed_time(self, end_event: Any) -> float:
        """Return milliseconds to another, in single precision; raise if one has not happened."""
        end_s = time.perf_counter() + READ_S
        device().forbid("Event.elapsed_time", is_of_thread=False)
        clock = device().clock
        clock.count("reads")
        for event in (self, end_event):
            if not event.enable_timing:
                raise ValueError("both events must be made with enable_timing=True")
            if event.time_s is None:
                raise ValueError("both events must be recorded before their time is read")
            if event.time_s > clock.host_s:
                raise RuntimeError("CUDA error: device not ready")
        exact_ms = (end_event.time_s - self.time_s) * 1e3
        (elapsed_ms,) = struct.unpack("f", struct.pack("f", exact_ms))
        while time.perf_counter() < end_s:
            pass
        return elapsed_ms


class Capture:
    """Capture of a graph in progress; ``invalidated_by`` names the action that broke it."""

    def __init__(self, mode: str, thread: int) -> None:
        if mode not in ("global", "thread_local", "relaxed"):
            raise ValueError(f"mode {mode!r} is no mode of a capture")
        self.mode = mode
        self.thread = thread
        self.invalidated_by = ""


@contextmanager
def capturing(mode: str = "global") -> Iterator[Capture]:
    """Capture on this thread; an invalidated capture raises at its end, as CUDA does."""
    one = device()
    if one.capture is not None:
        raise RuntimeError("a graph is being captured already")
    one.capture = Capture(mode, one.thread)
    try:
        yield one.capture
        if one.capture.invalidated_by:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
                f" ({one.capture.invalidated_by})"
            )
    finally:
        one.capture = None


class Graph:
    """Stand-in for ``torch.cuda.CUDAGraph``: it captures, and replays nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._open: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Begin a capture."""
        self._open = capturing(capture_error_mode)
        self._open.__enter__()

    def capture_end(self) -> None:
        """End the capture; raise if it was invalidated."""
        self._open.__exit__(None, None, None)

    def replay(self) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing: there is no state."""

    def pool(self) -> tuple[int, int]:
        """Return the id of no pool."""
        return (0, 0)


class graph:
    """Stand-in for ``torch.cuda.graph`` over ``Graph``, on a stream of its own."""

    def __init__(
        self,
        cuda_graph: Graph,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        **_: Any,
    ) -> None:
        self._graph, self._mode = cuda_graph, capture_error_mode
        self._context = StreamContext(stream or Stream())

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        self._context.__enter__()
        self._graph.capture_begin(capture_error_mode=self._mode)

    def __exit__(self, *_: Any) -> None:
        try:
            self._graph.capture_end()
        finally:
            self._context.__exit__()
