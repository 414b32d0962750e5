"""What takes its time says so on standard error, where that is a terminal; elsewhere nothing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

SILENT_S = 2.0
"""What takes no longer says nothing."""
_EVERY_S = 1.0


class Bar:
    """A share that grows, once there was something to wait for: by rich, else in plain text."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._rich: Any = None
        self._plain: _Line | None = None

    def told(self, what: str, frac: float) -> None:
        """So far it has come."""
        if self._rich is None and self._plain is None:
            is_late = time.monotonic() - self._begin_s > SILENT_S
            if not (is_late and _is_terminal()):
                return
            self._open(what)
        if self._plain is not None:
            self._plain.show(f"{what}: {100 * frac:.0f} %")
        elif self._rich is not None:
            self._rich.update(self._task, description=what, completed=frac)

    def _open(self, what: str) -> None:
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            self._plain = _Line(sys.stderr)
            return
        self._rich = Progress(console=Console(stderr=True), transient=True)
        self._task = self._rich.add_task(what, total=1.0)
        self._rich.start()

    def end(self) -> None:
        """Nothing of it is left."""
        if self._rich is not None:
            self._rich.stop()
        if self._plain is not None:
            self._plain.clear()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """The seconds that something takes, until its first word on any stream."""
    if not _is_terminal() or sys.stdout is None:
        yield
        return
    streams = sys.stdout, sys.stderr
    clock = _Clock(what, sys.stderr)
    sys.stdout, sys.stderr = (_Watched(stream, clock) for stream in streams)  # type: ignore[assignment]
    clock.start()
    try:
        yield
    finally:
        clock.end()
        sys.stdout, sys.stderr = streams


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class _Line:
    """One line of a terminal that is written anew; no escape codes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._shown = stream, 0

    def show(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody looks any more
            self._stream.write("\r" + text.ljust(self._shown))
            self._stream.flush()
        self._shown = len(text)

    def clear(self) -> None:
        if self._shown:
            self.show("")
            self.show("")
            self._shown = 0


class _Clock:
    def __init__(self, what: str, stream: TextIO) -> None:
        self._what, self._line = what, _Line(stream)
        self._begin_s = time.monotonic()
        self._lock, self._over = threading.Lock(), threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        pause_s = SILENT_S
        while not self._over.wait(pause_s):
            pause_s = _EVERY_S
            with self._lock:
                if not self._over.is_set():
                    self._line.show(f"{self._what}: {time.monotonic() - self._begin_s:.0f} s")

    def end(self) -> None:
        if not self._over.is_set():
            with self._lock:
                self._over.set()
                self._line.clear()


class _Watched:
    """A stream whose first word ends a clock, and which is else the stream."""

    def __init__(self, stream: TextIO, clock: _Clock) -> None:
        self._stream, self._clock = stream, clock

    def write(self, text: str) -> int:
        self._clock.end()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
