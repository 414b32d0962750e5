"""What the training process tells the companion, in bounded room while that one is at work."""

from __future__ import annotations

import threading
import time
from collections import deque
from itertools import chain
from typing import Any

Event = dict[str, Any]
MOST_STEPS = 10_000
"""Steps that wait at most; then the oldest go, which the newest tell more than."""
MOST_OTHERS = 1000
"""Evaluations and saves that wait at most."""


class EventQueue:
    """Filled by the thread that reads, emptied by the loop that answers.

    Steps are dropped, and counted, where there is no room.  Of closed windows the newest is kept,
    since only that one gets an answer.  The end is never lost.  Steps that nothing else presses are
    taken ``apart_s`` after those before: many at once cost half of what each alone does.
    """

    def __init__(self, most_steps: int = MOST_STEPS, *, apart_s: float = 0.0) -> None:
        self._changed = threading.Condition()
        self._apart_s, self._next_s = apart_s, 0.0
        self._others: deque[tuple[int, Event]] = deque(maxlen=MOST_OTHERS)
        self._kept: dict[object, deque[tuple[int, Event]]] = {
            "step": deque(maxlen=most_steps),
            "window_closed": deque(maxlen=1),
            "probed": deque(maxlen=1),
            "another": self._others,
        }
        self._num_put = 0
        self._is_over = False
        self.num_dropped = 0
        """Steps, evaluations and saves that nobody has seen."""

    def put(self, event: Event) -> None:
        """Keep an event; one that says the end closes the queue."""
        with self._changed:
            if self._is_over:
                return
            self._num_put += 1
            kind = event.get("event")
            kept = self._kept.get(kind, self._others)
            # A window that takes the place of another is no loss.
            self.num_dropped += 1 < len(kept) == kept.maxlen
            kept.append((self._num_put, event))
            self._is_over = kind == "end"
            if kind != "step" or len(kept) == 1:
                self._changed.notify()

    def close(self) -> None:
        """Nothing more will come."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def wait_for_window(self) -> None:
        """Return when a window has closed, or all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or bool(self._kept["window_closed"]))

    def take(self, timeout_s: float) -> tuple[list[Event], bool]:
        """All that has come, in its order, waiting a while for something; True: it was the last."""
        with self._changed:
            if self._changed.wait_for(self._has_any, timeout_s):
                self._changed.wait_for(self._is_pressing, self._next_s - time.monotonic())
                self._next_s = time.monotonic() + self._apart_s
            rows = sorted(chain(*self._kept.values()), key=lambda row: row[0])
            for kept in self._kept.values():
                kept.clear()
            return [event for _, event in rows], self._is_over

    def _has_any(self) -> bool:
        return self._is_over or any(self._kept.values())

    def _is_pressing(self) -> bool:
        return self._is_over or any(rows for kind, rows in self._kept.items() if kind != "step")
