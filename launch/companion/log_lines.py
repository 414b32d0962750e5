"""Lines of the companion in the training log, which may be gone or full like any other file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from ...calib.arguments.kept_arguments import masked_text

_T = TypeVar("_T")


def say(text: str) -> None:
    """One line into the training log; nothing where there is no text."""
    if text:
        say_lines([f"[forerun] {masked_text(text)}"])


def say_lines(lines: Iterable[str]) -> None:
    """Lines that have their prefix already."""
    with suppress(OSError, ValueError):  # nobody reads it any more, or its disk is full
        for line in lines:
            print(line, flush=True)


class Writing:
    """Runs what writes files; that one cannot be written is one line, and no reason to stop."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, write: Callable[[], _T]) -> _T | None:
        """What ``write`` returns; None where the file system refused."""
        try:
            return write()
        except OSError as err:
            reason = err.strerror or type(err).__name__
            if reason not in self._said:
                self._said.add(reason)
                say(
                    f"cannot write {err.filename or 'an answer'} ({reason}); free space or choose "
                    "another --calibrate-dir; answers still appear in this log"
                )
            return None
