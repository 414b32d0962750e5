"""Log lines that neither fail nor block, even if the log is broken, full or not read.

The descriptors are shared with the command and so cannot be made non-blocking; a thread writes,
and lines that are not read are dropped.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress

from ..batch_text import one_line

# Maximum number of lines buffered if a pipe is not read; the newest are retained.
_MOST_LINES = 200
_PATIENCE_S = 0.2
"""Longest wait of the caller for a line to be written, seconds."""


class LogWriter:
    """Writer to one descriptor; all methods are thread-safe and raise nothing."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque(maxlen=_MOST_LINES)
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        self._is_stuck = False

    def write_line(self, text: str) -> None:
        """Write one line, given without its line break."""
        with suppress(Exception):
            line = (text + "\n").encode("utf-8", "surrogateescape")
            with self._lock:
                self._lines.append(line)
                # The thread ends with the last line, so that none exists at a fork.
                if self._writer is None:
                    writer = threading.Thread(target=self._write, daemon=True)
                    writer.start()
                    self._writer = writer
            if not self._is_stuck:
                self.finish(_PATIENCE_S)

    def finish(self, patience_s: float) -> None:
        """Wait for unwritten lines, at most ``patience_s`` seconds."""
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
"""Write a line to standard output."""


def log_line(text: str) -> None:
    """Write one line to the job's log, on standard error; standard output is the command's."""
    _LOG.write_line(f"[forerun] {one_line(text)}")


def log_error(text: str) -> None:
    """Write one line in the format of a verb's error."""
    _LOG.write_line(f"forerun: {one_line(text)}")


def finish(patience_s: float = 1.0) -> None:
    """Flush both writers before the process ends."""
    for writer in (_LOG, _ANSWER):
        writer.finish(patience_s)


def reserve_standard_descriptors() -> None:
    """Occupy descriptors 0, 1 and 2 if closed, so that none of our files gets such a number.

    The placeholders are not inherited: the command finds them closed, as without the wrapper.
    """
    with suppress(OSError):
        while (handle := os.open(os.devnull, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))) <= 2:
            pass
        os.close(handle)
