"""Signals as values to be read in a loop: nothing is done inside a handler."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

END = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    if hasattr(signal, name)
)
"""What asks a program to end."""
WARN = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
"""What a scheduler sends some time before its limit; torchrun dies of it and leaves its workers."""


class SignalInbox:
    """A context in which ``END``, ``WARN`` and the end of children are collected."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._before: dict[int, Any] = {}
        self._wakeup = -1

    def __enter__(self) -> SignalInbox:
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (*END, *WARN, signal.SIGCHLD):
            # What nohup ignores stays ignored, here and in the command.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, _nothing)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def wait(self, timeout_s: float) -> list[int]:
        """The signals that came since the last call, or within the time; children left out."""
        waiting = select.poll()  # unlike select, of any number of open files
        waiting.register(self._read, select.POLLIN)
        if not waiting.poll(max(0.0, timeout_s) * 1000.0):
            return []
        with suppress(BlockingIOError):
            return [n for n in os.read(self._read, 4096) if n != signal.SIGCHLD]
        return []


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler must be there for the number to be written to the pipe."""
