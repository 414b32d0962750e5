"""Companion process on the last rank's node: answers and logs, using only idle processor time.

It sets the lowest priority before anything else, and loads pandas, the models and W&B only after
the first window has closed, so that it does not disturb the measurement.  Events arrive as JSON
lines on standard input; end of file means that training has ended, and it then finishes what it
can within a fixed time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...calib.workload.config_json import decode
from ...hooks.control.companion_link import SETTINGS_FD
from ...hooks.process.settings import CompanionSettings
from ..store.place import place_of
from ._log_lines import log_line
from ._memory_guard import FIT_NBYTES, LOAD_NBYTES, MemoryGuard
from ._status_writer import StatusWriter

if TYPE_CHECKING:
    from ._companion_loop import CompanionLoop

Event = dict[str, Any]
LOWEST_PRIORITY = 19
# Latency of answers and of step values; every wake-up takes processor time from training.
_TICK_S, _STEPS_APART_S, _MEMORY_TICK_S = 0.5, 1.0, 5.0
_MARGIN = 1.5
"""Remaining time required to analyse the last window, in multiples of the longest analysis."""
MOST_STEPS, MOST_OTHERS = 10_000, 1000
"""Queue limits: steps, of which the newest are retained, and evaluations and saves."""
LEAVE_AFTER_S = 25.0
"""Longest time from the end of training to the end of this process."""
LAST_WORDS_S = 5.0
"""Part of ``LEAVE_AFTER_S`` reserved for final results without another analysis."""
_GRACE_S = 2.0
"""Extra time to finish writing, before the alarm ends the process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until the training process ends or dies; return 0, or 1 if settings are unreadable."""
    # First, because a thread of training waits until the settings are read.
    try:
        companion_settings = _read_settings(argv)
    except (OSError, ValueError) as err:
        log_line(
            f"no live answers: the companion cannot read its settings ({err}); install the same "
            "forerun version for --calibrate-python"
        )
        return 1
    _lower_priority()
    # Ctrl-C is meant for training, which then closes our input; final results are still written.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    place_of(companion_settings).note_run()
    queue, shutdown, guard = EventQueue(apart_s=_STEPS_APART_S), Shutdown(), MemoryGuard(log_line)
    status = StatusWriter(companion_settings)
    status.start()
    threading.Thread(target=_read, args=(queue, shutdown, status), daemon=True).start()
    queue.wait_for_window()
    while not guard.allows(LOAD_NBYTES):
        if queue.wait_for_end(_MEMORY_TICK_S):
            return 0
    from ..known.node_links import write_links
    from ._companion_loop import CompanionLoop  # loads pandas and the models

    settings = companion_settings.settings
    write_links(settings.directory / "records" / settings.rank.run_id)

    companion_loop = CompanionLoop(
        companion_settings,
        give_order=_write_back,
        has_memory=lambda: guard.allows(FIT_NBYTES),
        waiting_steps=queue.waiting_steps,
    )
    shutdown.set_last_words(lambda: companion_loop.write_final_results(time.time()))
    longest_s, has_ended = _answer(companion_loop, queue, guard)
    companion_loop.finish(
        time.time(), is_analysed=shutdown.remaining_s > _MARGIN * longest_s, has_ended=has_ended
    )
    if shutdown.remaining_s > _MARGIN * longest_s > 0:
        _cache_fit(settings.directory)
    return 0


def _answer(
    companion_loop: CompanionLoop, queue: EventQueue, guard: MemoryGuard
) -> tuple[float, bool]:
    """Answer until the end, or until memory is short; return the longest processor time of an
    answer, seconds, and whether training has ended."""
    longest_s = 0.0
    is_over = has_missed = False
    while not is_over and not guard.is_short():
        events, is_over = queue.take(_TICK_S)
        for event in events:
            companion_loop.handle(event, time.time())
        if queue.num_dropped and not has_missed:
            has_missed = True
            companion_loop.report_dropped_events(queue.num_dropped)
        begin_s = time.process_time()
        if not is_over and companion_loop.poll(time.time()):
            longest_s = max(longest_s, time.process_time() - begin_s)
    return longest_s, is_over


def _cache_fit(directory: Path) -> None:
    """Cache the fit that the first ``predict`` or ``plan`` would otherwise have to make."""
    from ...calib.errors import ForerunError
    from ..known.machines import open_machine

    with suppress(ForerunError, OSError):
        open_machine(directory)


def _lower_priority() -> None:
    """Run in the idle scheduling class; outside Linux, at the lowest priority."""
    os.nice(LOWEST_PRIORITY)
    if hasattr(os, "SCHED_IDLE"):
        # Training preempts this class at once on wake-up, which niceness alone does not ensure.
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _write_back(order: dict[str, Any]) -> None:
    """Send an order to the training process over the socket pair that is our input."""
    with suppress(OSError):  # training is gone, or our input is a plain pipe
        os.write(0, json.dumps(order).encode() + b"\n")


def _read(queue: EventQueue, shutdown: Shutdown, status: StatusWriter) -> None:
    try:
        for line in sys.stdin:
            with suppress(ValueError, RecursionError):
                event = json.loads(line)
                if not isinstance(event, dict):
                    continue
                queue.put(event)
                status.note(event)
                if event.get("event") == "end":
                    break
    finally:
        shutdown.begin()
        status.end()
        queue.close()


def _read_settings(argv: Sequence[str] | None) -> CompanionSettings:
    """Read the session's settings from the file descriptor named on the command line."""
    parser = argparse.ArgumentParser(prog="forerun.companion")
    parser.add_argument(SETTINGS_FD, type=int, required=True)
    with os.fdopen(parser.parse_args(argv).settings_fd, encoding="utf-8") as file:
        return decode(CompanionSettings, json.load(file))


class EventQueue:
    """Bounded queue of training events, filled by a reader thread and emptied by the loop.

    Steps that do not fit are dropped and counted.  Only the newest closed window is retained, since
    only that one gets an answer.  The end is never lost.  Steps alone are taken at most every
    ``apart_s`` seconds: in batches they cost half as much as one by one.
    """

    def __init__(self, most_steps: int = MOST_STEPS, *, apart_s: float = 0.0) -> None:
        self._changed = threading.Condition()
        self._apart_s, self._next_s = apart_s, 0.0
        most = {"step": most_steps, "window_closed": 1, "probed": 1, "another": MOST_OTHERS}
        self._waiting: dict[object, deque[tuple[int, Event]]] = {
            kind: deque(maxlen=number) for kind, number in most.items()
        }
        self._num_put = self.num_dropped = 0
        """Dropped events: unread steps, evaluations and saves."""
        self._is_over = False

    def put(self, event: Event) -> None:
        """Add an event; the end event closes the queue."""
        with self._changed:
            if self._is_over:
                return
            self._num_put += 1
            kind = event.get("event")
            rows = self._waiting.get(kind, self._waiting["another"])
            # A window replaced by a newer one does not count as dropped.
            self.num_dropped += 1 < len(rows) == rows.maxlen
            rows.append((self._num_put, event))
            self._is_over = kind == "end"
            if kind != "step" or len(rows) == 1:
                self._changed.notify()

    def close(self) -> None:
        """Close the queue."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def wait_for_window(self) -> None:
        """Block until a window has closed or the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or bool(self._waiting["window_closed"]))

    def wait_for_end(self, timeout_s: float) -> bool:
        """Return whether the queue is closed, after waiting for that up to ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_over, timeout_s)

    def waiting_steps(self) -> list[Event]:
        """Return the queued steps, which stay queued."""
        with self._changed:
            return [event for _, event in self._waiting["step"]]

    def take(self, timeout_s: float) -> tuple[list[Event], bool]:
        """Return queued events in order, after waiting for one up to ``timeout_s``, and whether the
        queue is closed."""
        with self._changed:
            if self._changed.wait_for(self._has_any, timeout_s):
                self._changed.wait_for(self._is_pressing, self._next_s - time.monotonic())
                self._next_s = time.monotonic() + self._apart_s
            rows = sorted(chain(*self._waiting.values()), key=lambda row: row[0])
            for waiting in self._waiting.values():
                waiting.clear()
            return [event for _, event in rows], self._is_over

    def _has_any(self) -> bool:
        return self._is_over or any(self._waiting.values())

    def _is_pressing(self) -> bool:
        return self._is_over or any(r for kind, r in self._waiting.items() if kind != "step")


class Shutdown:
    """Ends this process a fixed time after training; begun by the thread that reads the end."""

    def __init__(self, leave_after_s: float = LEAVE_AFTER_S) -> None:
        self._leave_after_s = leave_after_s
        self._since_s: float | None = None
        self._last_words: Callable[[], object] | None = None

    def set_last_words(self, last_words: Callable[[], object]) -> None:
        """Set the function that writes final results if time runs out, maybe in another thread."""
        self._last_words = last_words

    def begin(self) -> None:
        """Start the timers at the end of training; a second call does nothing."""
        if self._since_s is not None:
            return
        self._since_s = time.monotonic()
        _leave_idle_class()
        words_s = max(0.0, self._leave_after_s - LAST_WORDS_S)
        # Exiting in the middle of a write is safe, because files are replaced atomically.
        for delay_s, act in (
            (words_s, self._run_last_words),
            (self._leave_after_s, lambda: os._exit(0)),
        ):
            timer = threading.Timer(delay_s, act)
            timer.daemon = True
            timer.start()
        # Timer threads cannot run while compiled code holds the interpreter lock.
        with suppress(AttributeError, ValueError, OSError):
            signal.setitimer(signal.ITIMER_REAL, self._leave_after_s + _GRACE_S)

    @property
    def remaining_s(self) -> float:
        """Seconds until the final results are due; the full time while training runs."""
        since_s = time.monotonic() if self._since_s is None else self._since_s
        return self._leave_after_s - LAST_WORDS_S - (time.monotonic() - since_s)

    def _run_last_words(self) -> None:
        if self._last_words is not None:
            # The loop may be writing the same results concurrently; ignore errors from that race.
            with suppress(Exception):
                self._last_words()


def _leave_idle_class() -> None:
    """Leave the idle scheduling class after training has ended, still at the lowest priority."""
    if hasattr(os, "SCHED_IDLE"):
        for thread in threading.enumerate():
            with suppress(OSError):
                os.sched_setscheduler(thread.native_id or 0, os.SCHED_OTHER, os.sched_param(0))
