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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...calib.workload import decode
from ...hooks.control import SETTINGS_FD
from ...hooks.process import CompanionSettings
from ..directory.publishing import Publisher, place_of
from .event_queue import EventQueue
from .log_lines import say
from .shutdown import Shutdown
from .status_writer import StatusWriter

if TYPE_CHECKING:
    from .companion_loop import CompanionLoop

LOWEST_PRIORITY = 19
# How late an answer may be, and values of steps: each wake-up takes from a processor of training.
_TICK_S = 0.5
_STEPS_APART_S = 1.0
_MARGIN = 1.5
"""The last window is analysed where there is this many times the processor time of an analysis."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until the training process ends or dies; 0, or 1 where there are no settings."""
    # A thread of training waits until the settings are read: before all else.
    try:
        told = _told(argv)
    except (OSError, ValueError) as err:
        say(
            f"no live answers: the companion cannot read its settings ({err}); install the same "
            "forerun version for --calibrate-python"
        )
        return 1
    _step_back()
    # Ctrl-C is for training, which then ends our input: what is known by then is still said.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    publisher = Publisher(place_of(told))
    say(publisher.begin(time.time()))
    publisher.start_beating(say)
    queue = EventQueue(apart_s=_STEPS_APART_S)
    shutdown, status = Shutdown(), StatusWriter(told, publisher)
    status.start()
    threading.Thread(target=_read, args=(queue, shutdown, status), daemon=True).start()
    queue.wait_for_window()
    from .companion_loop import CompanionLoop  # loads pandas and the models

    beside = CompanionLoop(told, publisher=publisher, give_order=_write_back)
    shutdown.knows(lambda: beside.say_last_words(time.time()))
    longest_s = _answer(beside, queue)
    has_time = shutdown.left_s > _MARGIN * longest_s
    beside.finish(time.time(), is_analysed=has_time)
    if shutdown.left_s > _MARGIN * longest_s > 0:
        _keep_fit(told.settings.directory)
    return 0


def _answer(beside: CompanionLoop, queue: EventQueue) -> float:
    """Until the end; the most processor time that an answer took, seconds."""
    longest_s = 0.0
    is_over = is_said = False
    while not is_over:
        events, is_over = queue.take(_TICK_S)
        for event in events:
            beside.handle(event, time.time())
        if queue.num_dropped and not is_said:
            is_said = True
            beside.miss(queue.num_dropped)
        begin_s = time.process_time()
        if not is_over and beside.poll(time.time()):
            longest_s = max(longest_s, time.process_time() - begin_s)
    return longest_s


def _keep_fit(directory: Path) -> None:
    """What the first ``predict`` or ``plan`` would have to fit."""
    from ...calib.errors import ForerunError
    from ..known.machines import open_machine

    with suppress(ForerunError, OSError):
        open_machine(directory)


def _step_back() -> None:
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


def _told(argv: Sequence[str] | None) -> CompanionSettings:
    """What the session tells over the descriptor that its command line names."""
    parser = argparse.ArgumentParser(prog="forerun.launch.companion")
    parser.add_argument(SETTINGS_FD, type=int, required=True)
    with os.fdopen(parser.parse_args(argv).settings_fd, encoding="utf-8") as file:
        return decode(CompanionSettings, json.load(file))
