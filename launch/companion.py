"""The process beside the last rank: answers and logs, and costs training nothing but idle time.

It takes the lowest priority before anything else, and loads pandas, the models and W&B only when
the first window has closed, so that it does not disturb what the window measures.  Events arrive as
JSON lines on its standard input; end of file means that training is gone, and it finishes what it
can.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..hooks.companion import SETTINGS_FD
from .options import Options
from .publishing import Publisher

if TYPE_CHECKING:
    from .beside import Beside

Event = dict[str, Any]
LOWEST_PRIORITY = 19
_TICK_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Run until the training process ends or dies; 0, or 1 where there are no settings."""
    # A thread of training waits until the settings are read: before all else.
    try:
        options = _options(argv)
    except (OSError, ValueError, KeyError, TypeError) as err:
        _say(f"no live answers: the companion was told nothing that it can read ({err})")
        return 1
    _step_back()
    # Ctrl-C is for training, which then ends our input: what is known by then is still said.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    publisher = Publisher(options.place)
    _say(publisher.begin(time.time()))
    publisher.start_beating(_say)
    beside: Beside | None = None
    held: list[Event] = []
    for event in _events():
        if event is not None:
            held.append(event)
        if beside is None and event is not None and event.get("event") == "window_closed":
            beside = _wake(options, publisher)
        if beside is not None:
            _hand_over(beside, held)
            beside.poll(time.time())
    beside = beside or _wake(options, publisher)
    _hand_over(beside, held)
    beside.finish(time.time())
    return 0


def _step_back() -> None:
    """Run only where nothing else wants to; elsewhere than on Linux, at the lowest priority."""
    os.nice(LOWEST_PRIORITY)
    if hasattr(os, "SCHED_IDLE"):
        # A wake-up of training interrupts it at once, which the lowest priority alone does not do.
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _hand_over(beside: Beside, held: list[Event]) -> None:
    for event in held:
        beside.handle(event, time.time())
    held.clear()


def _wake(options: Options, publisher: Publisher) -> Beside:
    from .beside import Beside

    return Beside(options, publisher=publisher, give_order=_write_back)


def _write_back(order: Event) -> None:
    """To the training process, over the pair of sockets that our input comes from."""
    with suppress(OSError):  # training is gone, or our input is a mere pipe
        os.write(0, json.dumps(order).encode() + b"\n")


def _events() -> Iterator[Event | None]:
    """The events up to the last one; None whenever none has come for a while."""
    events: queue.Queue[Event | None] = queue.Queue()
    threading.Thread(target=_read, args=(events,), daemon=True).start()
    while True:
        try:
            event = events.get(timeout=_TICK_S)
        except queue.Empty:
            yield None
            continue
        if event is None:
            return
        yield event
        if event.get("event") == "end":
            return


def _read(events: queue.Queue[Event | None]) -> None:
    for line in sys.stdin:
        try:
            events.put(json.loads(line))
        except json.JSONDecodeError:
            continue
    events.put(None)


def _options(argv: Sequence[str] | None) -> Options:
    """What the session tells over the descriptor that its command line names."""
    parser = argparse.ArgumentParser(prog="forerun.launch.companion")
    parser.add_argument(SETTINGS_FD, type=int, required=True)
    with os.fdopen(parser.parse_args(argv).settings_fd, encoding="utf-8") as file:
        told = json.load(file)
    return Options(
        directory=Path(told["directory"]),
        run_id=told["run_id"],
        launch_id=told.get("launch_id", ""),
        settings=told["settings"],
    )


def _say(text: str) -> None:
    if text:
        with suppress(OSError):  # nobody reads, or the disk is full
            print(f"[forerun] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
