"""Companion lines in the training log; failures to write are tolerated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from ...calib.arguments.passed_on import masked_text
from ...calib.errors import IN_THE_WAY, unwritable
from ...calib.shell import printable
from ..store.place import UnwrittenError

_T = TypeVar("_T")
_MOST_CHARS = 200


def log_line(text: str) -> None:
    """Print one line to the training log; nothing if the text is empty."""
    if text:
        print_lines([f"[forerun] {masked_text(text)}"])


def print_lines(lines: Iterable[str]) -> None:
    """Print lines that already have their prefix."""
    with suppress(OSError, ValueError):  # the reader is gone, or the disk is full
        for line in lines:
            print(printable(line), flush=True)


class WriteGuard:
    """Runs functions that write files; logs each kind of failure once and goes on."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()

    def __call__(self, write: Callable[[], _T]) -> _T | None:
        """Return the result of ``write``; None if a file could not be written."""
        try:
            return write()
        except UnwrittenError as err:
            for path, why in err.failures:
                self._report(str(path), why)
        except Exception as err:
            self._report("an answer", err)
        return None

    def _report(self, name: str, err: Exception) -> None:
        """Log one line per reason; for errors specific to one file, one line per file."""
        if isinstance(err, OSError):
            name, reason = str(err.filename or name), err.strerror or type(err).__name__
            is_of_one = err.errno in IN_THE_WAY
            text = f"{unwritable(name, err)}; answers still appear in this log"
        else:
            reason, is_of_one = f"{type(err).__name__}: {printable(str(err)[:_MOST_CHARS])}", True
            rest = "it is left out and all other answers are written; please report this line"
            text = f"cannot write {name} ({reason}); {rest}"
        key = (name if is_of_one else "", reason)
        if key not in self._reported:
            self._reported.add(key)
            log_line(text)
