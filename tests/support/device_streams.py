"""Streams, events and captures over a virtual clock, under the names of ``torch.cuda``.

What waits goes the way of ``torch/cuda/streams.py``: ``wait_stream`` records an event, and
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

READ_S = 2e-6
"""Real time that reading two events takes the host, besides what Python needs."""
_PER_STREAM = 16
_CPU = torch.device("cpu")


class Device:
    """The streams of one process: which is current on each thread, and whether one is captured."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.capture: Capture | None = None
        self._threads = threading.local()
        self.default = Stream.of(self, clock.line())

    @property
    def current(self) -> Stream:
        """The stream on which this thread queues work."""
        return getattr(self._threads, "stream", self.default)

    @current.setter
    def current(self, stream: Stream) -> None:
        self._threads.stream = stream

    @property
    def line(self) -> Line:
        """The queue of the current stream."""
        return self.current.line

    @property
    def thread(self) -> int:
        """The thread that runs, or the one that it runs for."""
        return getattr(self._threads, "acts_for", threading.get_ident())

    @thread.setter
    def thread(self, ident: int) -> None:
        self._threads.acts_for = ident

    def exchange_mode(self, mode: int) -> int:
        """``cudaThreadExchangeStreamCaptureMode``: 0 global, 1 of the thread, 2 relaxed."""
        before = getattr(self._threads, "mode", 0)
        self._threads.mode = mode
        return before

    def is_capturing(self) -> bool:
        """True on the thread that captures."""
        return self.capture is not None and self.capture.thread == self.thread

    def forbid(self, action: str, *, is_of_thread: bool) -> None:
        """Raise where a capture does not allow it, and end that capture's validity.

        ``is_of_thread``: only on the thread that captures, in whichever mode.
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
    """The device that is installed."""
    return _installed[-1]


def put_device(one: Device) -> None:
    """New streams and events are those of this device."""
    _installed.append(one)


def take_device() -> None:
    """The device before it is installed again."""
    _installed.pop()


class Stream:
    """A queue of the device; ``cuda_stream`` tells them apart, and is 0 for the default."""

    device = _CPU
    device_index = 0
    device_type = 1

    def __init__(self, device_: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority
        self._begin(device(), device().clock.line())

    @classmethod
    def of(cls, owner: Device, line: Line) -> Stream:
        """The stream of a queue that is there."""
        stream = object.__new__(cls)
        stream.priority = 0
        stream._begin(owner, line)
        return stream

    def _begin(self, owner: Device, line: Line) -> None:
        self.line, self.owner = line, owner
        self.cuda_stream = self.stream_id = line.number * _PER_STREAM
        self._before: list[Stream] = []

    def wait_event(self, event: Any) -> None:
        """Later work of this stream waits for the event."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Later work of this stream waits for what is queued on the other now."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        """Record ``event``, or a new one, and return it."""
        if event is None:
            event = torch.cuda.Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Has the host seen the end of all that is queued?"""
        self.owner.forbid("Stream.query", is_of_thread=False)
        self.owner.clock.host_s += QUERY_S
        return self.owner.clock.host_s >= self.line.busy_s

    def synchronize(self) -> None:
        """The host waits for all that is queued."""
        self.owner.forbid("Stream.synchronize", is_of_thread=False)
        self.owner.clock.synchronize(self.line)

    def is_capturing(self) -> bool:
        """Is a graph captured on this thread?"""
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
    """``torch.cuda.stream``: may be entered again, inside itself too."""

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
    """A moment of a stream, which the host learns of late and reads in single precision."""

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
        """A number of its own, once it was recorded."""
        return id(self) if self.time_s is not None else 0

    def record(self, stream: Any = None) -> None:
        """Happens when all that is queued on the stream now has been done."""
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
        """Later work of the stream waits for it."""
        if stream is None:
            stream = torch.cuda.current_stream()
        if self.time_s is not None and self.line is not None:
            device().clock.stall(stream.line, self.time_s, self.line)

    def query(self) -> bool:
        """Does the host know by now that it has happened?"""
        device().forbid("Event.query", is_of_thread=False)
        clock = device().clock
        clock.count("queries")
        clock.host_s += QUERY_S
        return self.time_s is None or clock.host_s >= self.time_s

    def synchronize(self) -> None:
        """The host waits for it."""
        device().forbid("Event.synchronize", is_of_thread=False)
        if self.time_s is not None:
            device().clock.host_reaches(self.time_s)

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds to another, in single precision; raises where one has not happened."""
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
    """A graph that is being captured; ``invalidated_by`` names what broke it."""

    def __init__(self, mode: str, thread: int) -> None:
        if mode not in ("global", "thread_local", "relaxed"):
            raise ValueError(f"mode {mode!r} is no mode of a capture")
        self.mode = mode
        self.thread = thread
        self.invalidated_by = ""


@contextmanager
def capturing(mode: str = "global") -> Iterator[Capture]:
    """Capture on this thread.  That it was invalidated is told at its end, as CUDA tells it."""
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
    """``torch.cuda.CUDAGraph``: captured, and replayed as nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._open: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Begin."""
        self._open = capturing(capture_error_mode)
        self._open.__enter__()

    def capture_end(self) -> None:
        """End; raises where it was invalidated."""
        self._open.__exit__(None, None, None)

    def replay(self) -> None:
        """Nothing is computed."""

    def reset(self) -> None:
        """Nothing is kept."""

    def pool(self) -> tuple[int, int]:
        """No pool of its own."""
        return (0, 0)


class graph:
    """``torch.cuda.graph`` over ``Graph``, on a stream of its own."""

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
