"""A companion leaves at a fixed time after training has, whatever it is doing then."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

LEAVE_AFTER_S = 25.0
"""From the end of training to the end of this process, at most."""
LAST_WORDS_S = 5.0
"""Of these: for what can be said without another analysis."""
# For what is being written; then the alarm ends the process.
_GRACE_S = 2.0


class Shutdown:
    """Begins with the end of training, from the thread that hears of it."""

    def __init__(self, leave_after_s: float = LEAVE_AFTER_S) -> None:
        self._leave_after_s = leave_after_s
        self._since_s: float | None = None
        self._last_words: Callable[[], object] | None = None

    def knows(self, last_words: Callable[[], object]) -> None:
        """What is said and written if there is no time for more; may run in another thread."""
        self._last_words = last_words

    def begin(self) -> None:
        """Training has ended: the time runs; a second call changes nothing."""
        if self._since_s is not None:
            return
        self._since_s = time.monotonic()
        _come_forward()
        words_s = max(0.0, self._leave_after_s - LAST_WORDS_S)
        for delay_s, act in ((words_s, self._speak), (self._leave_after_s, _leave)):
            timer = threading.Timer(delay_s, act)
            timer.daemon = True
            timer.start()
        # Where compiled code keeps the interpreter no thread of ours comes to its turn.
        with suppress(AttributeError, ValueError, OSError):
            signal.setitimer(signal.ITIMER_REAL, self._leave_after_s + _GRACE_S)

    @property
    def left_s(self) -> float:
        """Until the last words are due; all of it while training goes on."""
        since_s = time.monotonic() if self._since_s is None else self._since_s
        return self._leave_after_s - LAST_WORDS_S - (time.monotonic() - since_s)

    def _speak(self) -> None:
        if self._last_words is not None:
            # The loop may be at work on the same things: what then fails was its own to say.
            with suppress(Exception):
                self._last_words()


def _come_forward() -> None:
    """Training is gone: from the idle class to that of others, still at the lowest priority."""
    if hasattr(os, "SCHED_IDLE"):
        for thread in threading.enumerate():
            with suppress(OSError):
                os.sched_setscheduler(thread.native_id or 0, os.SCHED_OTHER, os.sched_param(0))


def _leave() -> None:
    """Answers are replaced at once, so that none is left half written."""
    os._exit(0)
