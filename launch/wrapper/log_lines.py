"""Lines for the job's log that neither fail nor wait: it may be broken, full or read by nobody.

The descriptors are shared with the command, so that they cannot be made non-blocking; a thread
writes, and lines that nobody takes are dropped.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress

# Behind a pipe that nobody reads; the newest stay.
_MOST_LINES = 200
_MOST_CHARS = 2000
_PATIENCE_S = 0.2
"""A line has so long before the caller goes on without knowing."""


class LogWriter:
    """One descriptor; any method may be called from any thread and raises nothing."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque(maxlen=_MOST_LINES)
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        self._is_stuck = False

    def write_line(self, text: str) -> None:
        """One line, as text without its end."""
        with suppress(Exception):
            line = (text + "\n").encode("utf-8", "surrogateescape")
            with self._lock:
                self._lines.append(line)
                # It ends with the last line, so that none is there at a fork.
                if self._writer is None:
                    writer = threading.Thread(target=self._write, daemon=True)
                    writer.start()
                    self._writer = writer
            if not self._is_stuck:
                self.finish(_PATIENCE_S)

    def finish(self, patience_s: float) -> None:
        """Wait for what is not written yet, but no longer."""
        writer = self._writer
        if writer is not None:
            writer.join(patience_s)
            self._is_stuck = writer.is_alive()

    def _write(self) -> None:
        while True:
            with self._lock:
                if not self._lines:
                    self._writer = None
                    return
                line = self._lines.popleft()
            with suppress(OSError):
                while line:
                    line = line[os.write(self._descriptor, line) :]


_LOG, _ANSWER = LogWriter(2), LogWriter(1)
print_line = _ANSWER.write_line
"""A line of standard output."""


def log_line(text: str) -> None:
    """One line for the job's log; standard output is the command's."""
    _LOG.write_line(f"[forerun] {one_line(text)}")


def log_error(text: str) -> None:
    """One line as any verb says an error."""
    _LOG.write_line(f"forerun: {one_line(text)}")


def finish(patience_s: float = 1.0) -> None:
    """Before the process ends."""
    for writer in (_LOG, _ANSWER):
        writer.finish(patience_s)


def reserve_standard_descriptors() -> None:
    """Where 0, 1 or 2 was closed, no file of ours may come to have that number.

    What takes its place is not inherited: the command finds it closed, as without us.
    """
    with suppress(OSError):
        while (handle := os.open(os.devnull, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))) <= 2:
            pass
        os.close(handle)


def one_line(text: str) -> str:
    """Without line breaks and control characters, and not longer."""
    words = "".join(c if c.isprintable() else " " for c in text[: 4 * _MOST_CHARS]).split()
    return " ".join(words)[:_MOST_CHARS]
