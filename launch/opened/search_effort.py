"""How a verb searches: with its progress, and stopped by the user's first Ctrl-C."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from ...calib.search import Effort
from ..report.progress import Bar


@contextmanager
def search_effort(top: int) -> Iterator[Effort]:
    """The effort of a search for so many layouts; a second Ctrl-C ends the verb as ever."""
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        print("stopping: the best so far follows", file=sys.stderr, flush=True)

    before = None
    with suppress(ValueError):  # not the main thread
        before = signal.signal(signal.SIGINT, stop)
    progress = Bar()
    try:
        yield Effort(
            top=top,
            is_stopped=lambda: bool(asked),
            told=progress.told,
        )
    finally:
        progress.end()
        if before is not None:
            signal.signal(signal.SIGINT, before)
