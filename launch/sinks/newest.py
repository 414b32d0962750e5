"""Sends the newest of what comes, from a thread of its own: what is slow holds up nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.client import HTTPException
from typing import Generic, TypeVar

_T = TypeVar("_T")
PATIENCE_S = 4.0
"""How long the last one is waited for at the end of a run."""
_MOST_APART_S = 60.0


class Newest(Generic[_T]):
    """Calls ``send`` with the newest value, at most once in ``every_s``.

    Where that fails ``tell`` hears of it once, and the newest is tried again, less often each time.
    """

    def __init__(
        self,
        send: Callable[[_T], object],
        *,
        every_s: float,
        tell: Callable[[str], object],
        name: str,
    ) -> None:
        self._send, self._every_s, self._tell = send, every_s, tell
        self._changed = threading.Condition()
        self._value: _T | None = None
        self._apart_s, self._next_s = every_s, 0.0
        self._is_over = self._is_told = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, value: _T) -> None:
        """Take the place of a value that waits; returns at once."""
        with self._changed:
            self._value = value
            self._changed.notify()

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Send what waits now, whenever the last was, and wait for that a while."""
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
            if not self._is_told:
                self._is_told = True
                self._tell(f"{err or type(err).__name__}; Forerun tries again")
            with self._changed:
                self._value = value if self._value is None else self._value
        else:
            self._apart_s = self._every_s
        self._next_s = time.monotonic() + self._apart_s
