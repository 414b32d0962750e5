"""What the training process tells the companion, in bounded room while that one is at work."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

Event = dict[str, Any]
MOST_STEPS = 10_000
"""Steps that wait at most; then the oldest go, which the newest tell more than."""
MOST_OTHERS = 1000
"""Evaluations and saves that wait at most."""
_NEWEST_ONLY = frozenset({"window_closed", "probed"})


class EventQueue:
    """Filled by the thread that reads, emptied by the loop that answers.

    Steps are dropped, and counted, where there is no room.  Of closed windows the newest is kept,
    since only that one gets an answer.  The end is never lost.
    """

    def __init__(self, most_steps: int = MOST_STEPS) -> None:
        self._changed = threading.Condition()
        self._steps: deque[tuple[int, Event]] = deque(maxlen=most_steps)
        self._others: deque[tuple[int, Event]] = deque(maxlen=MOST_OTHERS)
        self._newest: dict[str, tuple[int, Event]] = {}
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
            row = self._num_put, event
            kind = event.get("event")
            if kind in _NEWEST_ONLY:
                self._newest[str(kind)] = row
            else:
                kept = self._steps if kind == "step" else self._others
                self.num_dropped += len(kept) == kept.maxlen
                kept.append(row)
            self._is_over = kind == "end"
            self._changed.notify()

    def close(self) -> None:
        """Nothing more will come."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def wait_for_window(self) -> None:
        """Return when a window has closed, or all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or "window_closed" in self._newest)

    def take(self, timeout_s: float) -> tuple[list[Event], bool]:
        """All that has come, in its order, waiting a while for something; True: it was the last."""
        with self._changed:
            self._changed.wait_for(self._has_any, timeout_s)
            rows = sorted(
                (*self._steps, *self._others, *self._newest.values()), key=lambda row: row[0]
            )
            self._steps.clear()
            self._others.clear()
            self._newest.clear()
            return [event for _, event in rows], self._is_over

    def _has_any(self) -> bool:
        return self._is_over or bool(self._steps or self._others or self._newest)
