"""How a verb searches: on both cores, with its progress, and stopped by the user's first Ctrl-C."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from ...calib.search.found import Effort, in_turn
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
            pool=forked if _can_fork() else in_turn,
            is_stopped=lambda: bool(asked),
            told=progress.told,
        )
    finally:
        progress.end()
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _can_fork() -> bool:
    return (os.cpu_count() or 1) > 1 and "fork" in multiprocessing.get_all_start_methods()


@contextmanager
def forked(function: Callable[[Any], Any]) -> Iterator[Callable[[Sequence[Any]], Sequence[Any]]]:
    """The function over sequences, the first of each here and the others in a second process."""
    second = _SecondProcess(function)
    try:
        yield second.mapped
    finally:
        second.end()


class _SecondProcess:
    """A process that knows what this one knew when it was first needed."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._process: BaseProcess | None = None

    def mapped(self, asked: Sequence[Any]) -> Sequence[Any]:
        if len(asked) < 2:
            return [self._function(one) for one in asked]
        if self._process is None:
            self._process = self._started()
        self._ours.send(asked[1:])
        first = self._function(asked[0])
        others = self._ours.recv()
        if isinstance(others, BaseException):
            raise others
        return [first, *others]

    def _started(self) -> BaseProcess:
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(self._function, theirs, self._ours), daemon=True
        )
        with warnings.catch_warnings():
            # Threads of libraries that compute: the new process starts its own.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        return process

    def end(self) -> None:
        if self._process is not None:
            with suppress(OSError):
                self._ours.send(None)
            self._process.join(timeout=1.0)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()


def _serve(function: Callable[[Any], Any], pipe: Any, others: Any) -> None:
    # Only so does the pipe end where the first process is killed.
    others.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        while (asked := pipe.recv()) is not None:
            try:
                found: Any = [function(one) for one in asked]
            except Exception as err:
                found = err
            pipe.send(found)
