"""The process beside the last rank: answers and logs, and costs training nothing but idle time.

It takes the lowest priority before anything else, and loads pandas, the models and W&B only when
the first window has closed, so that it does not disturb what the window measures.  Events arrive as
JSON lines on its standard input; end of file means that training is gone, and it finishes what it
can in a fixed time.
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

from ...calib.workload import decode
from ...hooks.control import SETTINGS_FD
from ...hooks.process import CompanionSettings
from ..store import Publisher, place_of
from .log_lines import log_line
from .status_writer import StatusWriter

if TYPE_CHECKING:
    from .companion_loop import CompanionLoop

Event = dict[str, Any]
LOWEST_PRIORITY = 19
# How late an answer may be, and values of steps: each wake-up takes from a processor of training.
_TICK_S, _STEPS_APART_S = 0.5, 1.0
_MARGIN = 1.5
"""The last window is analysed where there is this many times the processor time of an analysis."""
MOST_STEPS, MOST_OTHERS = 10_000, 1000
"""Steps that wait at most, of which the newest tell more, and evaluations and saves."""
LEAVE_AFTER_S = 25.0
"""From the end of training to the end of this process, at most."""
LAST_WORDS_S = 5.0
"""Of these: for what can be said without another analysis."""
_GRACE_S = 2.0
"""For what is being written; then the alarm ends the process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until the training process ends or dies; 0, or 1 where there are no settings."""
    # A thread of training waits until the settings are read: before all else.
    try:
        companion_settings = _read_settings(argv)
    except (OSError, ValueError) as err:
        log_line(
            f"no live answers: the companion cannot read its settings ({err}); install the same "
            "forerun version for --calibrate-python"
        )
        return 1
    _lower_priority()
    # Ctrl-C is for training, which then ends our input: what is known by then is still said.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    publisher = Publisher(place_of(companion_settings))
    log_line(publisher.begin(time.time()))
    publisher.start_heartbeat(log_line)
    queue, shutdown = EventQueue(apart_s=_STEPS_APART_S), Shutdown()
    status = StatusWriter(companion_settings, publisher)
    status.start()
    threading.Thread(target=_read, args=(queue, shutdown, status), daemon=True).start()
    queue.wait_for_window()
    from .companion_loop import CompanionLoop  # loads pandas and the models

    companion_loop = CompanionLoop(companion_settings, publisher=publisher, give_order=_write_back)
    shutdown.set_last_words(lambda: companion_loop.write_final_results(time.time()))
    longest_s = _answer(companion_loop, queue)
    companion_loop.finish(time.time(), is_analysed=shutdown.remaining_s > _MARGIN * longest_s)
    if shutdown.remaining_s > _MARGIN * longest_s > 0:
        _cache_fit(companion_settings.settings.directory)
    return 0


def _answer(companion_loop: CompanionLoop, queue: EventQueue) -> float:
    """Answer until the end; the most processor time that an answer took, seconds."""
    longest_s = 0.0
    is_over = has_missed = False
    while not is_over:
        events, is_over = queue.take(_TICK_S)
        for event in events:
            companion_loop.handle(event, time.time())
        if queue.num_dropped and not has_missed:
            has_missed = True
            companion_loop.report_dropped_events(queue.num_dropped)
        begin_s = time.process_time()
        if not is_over and companion_loop.poll(time.time()):
            longest_s = max(longest_s, time.process_time() - begin_s)
    return longest_s


def _cache_fit(directory: Path) -> None:
    """Make the fit that the first ``predict`` or ``plan`` would have to make."""
    from ...calib.errors import ForerunError
    from ..known import open_machine

    with suppress(ForerunError, OSError):
        open_machine(directory)


def _lower_priority() -> None:
    """Run only where nothing else wants to; elsewhere than on Linux, at the lowest priority."""
    os.nice(LOWEST_PRIORITY)
    if hasattr(os, "SCHED_IDLE"):
        # A wake-up of training interrupts it at once, which the lowest priority alone does not do.
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _write_back(order: dict[str, Any]) -> None:
    """To the training process, over the pair of sockets that our input comes from."""
    with suppress(OSError):  # training is gone, or our input is a mere pipe
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
    """What the session tells over the descriptor that its command line names."""
    parser = argparse.ArgumentParser(prog="forerun.companion")
    parser.add_argument(SETTINGS_FD, type=int, required=True)
    with os.fdopen(parser.parse_args(argv).settings_fd, encoding="utf-8") as file:
        return decode(CompanionSettings, json.load(file))


class EventQueue:
    """What training tells, in bounded room: filled by a thread that reads, emptied by the loop.

    Steps are dropped, and counted, where there is no room.  Of closed windows the newest is kept,
    since only that one gets an answer.  The end is never lost.  Steps that nothing else presses are
    taken ``apart_s`` after those before: many at once cost half of what each alone does.
    """

    def __init__(self, most_steps: int = MOST_STEPS, *, apart_s: float = 0.0) -> None:
        self._changed = threading.Condition()
        self._apart_s, self._next_s = apart_s, 0.0
        most = {"step": most_steps, "window_closed": 1, "probed": 1, "another": MOST_OTHERS}
        self._waiting: dict[object, deque[tuple[int, Event]]] = {
            kind: deque(maxlen=number) for kind, number in most.items()
        }
        self._num_put = self.num_dropped = 0
        """Dropped are steps, evaluations and saves that nobody has seen."""
        self._is_over = False

    def put(self, event: Event) -> None:
        """Keep an event; one that says the end closes the queue."""
        with self._changed:
            if self._is_over:
                return
            self._num_put += 1
            kind = event.get("event")
            rows = self._waiting.get(kind, self._waiting["another"])
            # A window that takes the place of another is no loss.
            self.num_dropped += 1 < len(rows) == rows.maxlen
            rows.append((self._num_put, event))
            self._is_over = kind == "end"
            if kind != "step" or len(rows) == 1:
                self._changed.notify()

    def close(self) -> None:
        """Nothing more will come."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def wait_for_window(self) -> None:
        """Return when a window has closed, or all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or bool(self._waiting["window_closed"]))

    def take(self, timeout_s: float) -> tuple[list[Event], bool]:
        """All that has come, in its order, waiting a while for something; True: it was the last."""
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
    """Ends this process a fixed time after training; the thread that hears of that begins it."""

    def __init__(self, leave_after_s: float = LEAVE_AFTER_S) -> None:
        self._leave_after_s = leave_after_s
        self._since_s: float | None = None
        self._last_words: Callable[[], object] | None = None

    def set_last_words(self, last_words: Callable[[], object]) -> None:
        """What is said and written if there is no time for more; may run in another thread."""
        self._last_words = last_words

    def begin(self) -> None:
        """Training has ended: the time runs; a second call changes nothing."""
        if self._since_s is not None:
            return
        self._since_s = time.monotonic()
        _leave_idle_class()
        words_s = max(0.0, self._leave_after_s - LAST_WORDS_S)
        # Answers are replaced at once, so that none is left half written.
        for delay_s, act in (
            (words_s, self._run_last_words),
            (self._leave_after_s, lambda: os._exit(0)),
        ):
            timer = threading.Timer(delay_s, act)
            timer.daemon = True
            timer.start()
        # Where compiled code keeps the interpreter no thread of ours comes to its turn.
        with suppress(AttributeError, ValueError, OSError):
            signal.setitimer(signal.ITIMER_REAL, self._leave_after_s + _GRACE_S)

    @property
    def remaining_s(self) -> float:
        """Until the last words are due; all of it while training goes on."""
        since_s = time.monotonic() if self._since_s is None else self._since_s
        return self._leave_after_s - LAST_WORDS_S - (time.monotonic() - since_s)

    def _run_last_words(self) -> None:
        if self._last_words is not None:
            # The loop may be at work on the same things: what then fails was its own to say.
            with suppress(Exception):
                self._last_words()


def _leave_idle_class() -> None:
    """Training is gone: from the idle class to that of others, still at the lowest priority."""
    if hasattr(os, "SCHED_IDLE"):
        for thread in threading.enumerate():
            with suppress(OSError):
                os.sched_setscheduler(thread.native_id or 0, os.SCHED_OTHER, os.sched_param(0))
