"""Sink interface: a destination for the values of a run while it runs."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...calib.records.run_values import ITERATION

_T = TypeVar("_T")
PATIENCE_S = 4.0
"""Longest wait for the last value to be sent at the end of a run, seconds."""
_MOST_APART_S = 60.0
OFF_UNWRITABLE = "off (the directory cannot be written)"
"""Status of a sink in the run's directory that cannot write; the ranks report the reason."""


def is_writable(directory: Path) -> bool:
    """True if files can be written into a directory, which is created if missing."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(b"?")
    except OSError:
        return False
    return True


class Sink:
    """Sink that ignores everything; a subclass overrides the methods that it needs.

    Its opener gets the ``CompanionSettings`` of the run.  A method may raise: the error is logged
    in one line, and the sink is not called again.
    """

    def __init__(self, where: str = "off") -> None:
        self.where = where
        """Location of the values, or why there is none; for the log.  Empty: not requested."""
        self.notify: Callable[[str], object] = lambda text: None
        """Logs a line on a failure that is retried; set by the registry."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of one step, by the names of ``calib/records/run_values.py``.

        ``unix_s`` is the step's end; a constant is sent once, and again if it has changed.
        """

    def tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Take the tables of an answer, one mapping per row: numbers, text, and None if empty."""

    def score(self, summary: Mapping[str, Any]) -> None:
        """Take the score of predictions so far; called every few seconds."""

    def alert(self, title: str, text: str) -> None:
        """Alert the user at once."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """Close the sink at the end of the run; ``summary`` is the score of its predictions."""


class ThrottledSender(Generic[_T]):
    """Calls ``send`` with the newest value, at most once per ``every_s`` seconds.

    On failure, ``notify`` is called once, and the newest value is retried at growing intervals.
    """

    def __init__(
        self,
        send: Callable[[_T], object],
        *,
        every_s: float,
        notify: Callable[[str], object],
        name: str,
    ) -> None:
        self._send, self._every_s, self._notify = send, every_s, notify
        self._changed = threading.Condition()
        self._value: _T | None = None
        self._apart_s, self._next_s = every_s, 0.0
        self._is_over = self._has_notified = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, value: _T) -> None:
        """Replace the pending value; returns at once."""
        with self._changed:
            self._value = value
            self._changed.notify()

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Send the pending value regardless of ``every_s``, waiting at most ``patience_s``
        seconds."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join(patience_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._value is not None)
                self._changed.wait_for(lambda: self._is_over, self._next_s - time.monotonic())
                value, self._value = self._value, None
                is_over = self._is_over
            if value is not None:
                self._try(value)
            if is_over:
                return

    def _try(self, value: _T) -> None:
        try:
            self._send(value)
        except (OSError, ValueError, HTTPException) as err:
            self._apart_s = min(max(_MOST_APART_S, self._every_s), 2 * self._apart_s)
            if not self._has_notified:
                self._has_notified = True
                self._notify(f"{err or type(err).__name__}; Forerun tries again")
            with self._changed:
                self._value = value if self._value is None else self._value
        else:
            self._apart_s = self._every_s
        self._next_s = time.monotonic() + self._apart_s


class LatestValues(Sink):
    """Sends the latest value of each name, at most once per ``every_s`` seconds and at the end."""

    def __init__(
        self, where: str, send: Callable[[dict[str, float]], object], *, every_s: float, name: str
    ) -> None:
        super().__init__(where)
        self._values: dict[str, float] = {}
        self._newest: ThrottledSender[dict[str, float]] = ThrottledSender(
            send, every_s=every_s, notify=lambda text: self.notify(text), name=f"forerun-{name}"
        )

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Replace earlier values of these names."""
        self._values |= {ITERATION: float(step), **values}
        self._newest.put({**self._values})

    def close(self, summary: Mapping[str, Any]) -> None:
        """Send the last values regardless of the interval."""
        self._newest.close()
