"""Lines of the companion in the training log, which may be gone or full like any other file."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from ...calib.arguments import masked_text
from ...calib.shell import shown
from ..store import UnwrittenError

_T = TypeVar("_T")
_OF_ONE_FILE = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENOTEMPTY)
_MOST_CHARS = 200


def log_line(text: str) -> None:
    """One line into the training log; nothing where there is no text."""
    if text:
        print_lines([f"[forerun] {masked_text(text)}"])


def print_lines(lines: Iterable[str]) -> None:
    """Lines that have their prefix already."""
    with suppress(OSError, ValueError):  # nobody reads it any more, or its disk is full
        for line in lines:
            # A name of bytes that are no text is shown by their numbers.
            print(line.encode("utf-8", "backslashreplace").decode(), flush=True)


class WriteGuard:
    """Runs what writes files; that one cannot be written is one line, and no reason to stop."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()

    def __call__(self, write: Callable[[], _T]) -> _T | None:
        """What ``write`` returns; None where a file could not be made or written."""
        try:
            return write()
        except UnwrittenError as err:
            for path, why in err.failures:
                self._report(str(path), why)
        except Exception as err:
            self._report("an answer", err)
        return None

    def _report(self, name: str, err: Exception) -> None:
        """One line for a reason; what is the matter with one file alone is said of each."""
        if isinstance(err, OSError):
            name, reason = str(err.filename or name), err.strerror or type(err).__name__
            is_of_one = err.errno in _OF_ONE_FILE
            remedy = f"remove {name}" if is_of_one else "free space"
            rest = f"{remedy} or choose another --calibrate-dir; answers still appear in this log"
        else:
            reason, is_of_one = f"{type(err).__name__}: {shown(str(err)[:_MOST_CHARS])}", True
            rest = "it is left out and all other answers are written; please report this line"
        key = (name if is_of_one else "", reason)
        if key not in self._reported:
            self._reported.add(key)
            log_line(f"cannot write {name} ({reason}); {rest}")
