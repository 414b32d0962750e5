"""Progress output on standard error, only if that is a terminal."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from ...calib.search.results import Effort

SILENT_S = 2.0
"""Shorter waits show no progress."""
_EVERY_S = 1.0


class _Line:
    """Line on standard error that is rewritten without escape codes; nothing is written to
    files."""

    def __init__(self) -> None:
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._stream: TextIO | None = sys.stderr if is_terminal else None
        self._begin_s, self._width = time.monotonic(), 0

    @property
    def is_shown(self) -> bool:
        """True if standard error is a terminal."""
        return self._stream is not None

    @property
    def age_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._begin_s

    def show(self, text: str) -> None:
        if self._stream is not None:
            with suppress(OSError, ValueError):  # the terminal is gone
                self._stream.write("\r" + text.ljust(self._width))
                self._stream.flush()
            self._width = len(text)

    def clear(self) -> None:
        if self._width:
            self.show("")
            self.show("")


class Bar:
    """Progress in percent, shown after ``SILENT_S``."""

    def __init__(self) -> None:
        self._line = _Line()

    def update(self, what: str, frac: float) -> None:
        """Show the progress."""
        if self._line.age_s > SILENT_S:
            self._line.show(f"{what}: {100 * frac:.0f} %")

    def end(self) -> None:
        """Clear the line."""
        self._line.clear()


@contextmanager
def search_effort(top: int) -> Iterator[Effort]:
    """Provide the effort of a search for ``top`` layouts, with progress; the first Ctrl-C stops the
    search, a second one ends the verb as usual."""
    from ...calib.search.results import Effort

    interrupts: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(number)
        print("stopping: the best so far follows", file=sys.stderr, flush=True)

    before, bar = None, Bar()
    with suppress(ValueError):  # not the main thread
        before = signal.signal(signal.SIGINT, stop)
    try:
        yield Effort(top=top, is_stopped=lambda: bool(interrupts), on_progress=bar.update)
    finally:
        bar.end()
        if before is not None:
            signal.signal(signal.SIGINT, before)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show elapsed seconds until the first output on any stream."""
    clock = _Clock(what)
    if not clock.line.is_shown or sys.stdout is None:
        yield
        return
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Watched(stream, clock) for stream in streams)  # type: ignore[assignment]
    threading.Thread(target=clock.run, daemon=True).start()
    try:
        yield
    finally:
        clock.end()
        sys.stdout, sys.stderr = streams


class _Clock:
    def __init__(self, what: str) -> None:
        self._what, self.line = what, _Line()
        self._lock, self._over = threading.Lock(), threading.Event()

    def run(self) -> None:
        pause_s = SILENT_S
        while not self._over.wait(pause_s):
            pause_s = _EVERY_S
            with self._lock:
                if not self._over.is_set():
                    self.line.show(f"{self._what}: {self.line.age_s:.0f} s")

    def end(self) -> None:
        if not self._over.is_set():
            with self._lock:
                self._over.set()
                self.line.clear()


class _Watched:
    """Stream wrapper that stops a clock at the first write."""

    def __init__(self, stream: TextIO, clock: _Clock) -> None:
        self._stream, self._clock = stream, clock

    def write(self, text: str) -> int:
        self._clock.end()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
