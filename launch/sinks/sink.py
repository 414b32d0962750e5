"""What a sink is: a place beside answers that the values of a run go to while it runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

NO_ROOM = "off (the directory cannot be written)"
"""What a sink in the run's own directory says there; why, the ranks have said."""


def has_room(directory: Path) -> bool:
    """Whether files can be written into a directory, which is made where it is not there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(b"?")
    except OSError:
        return False
    return True


def _to_nobody(text: str) -> None:
    """Where there is no log."""


class Sink:
    """Takes nothing; a sink of your own overrides what it takes.

    Its opener gets the ``CompanionSettings`` of the run.  A method may raise: one line says so, and
    the sink is not called again.
    """

    def __init__(self, where: str = "off") -> None:
        self.where = where
        """Where the values can be found, or why they cannot; for the log.  Empty: nobody asked."""
        self.tell: Callable[[str], object] = _to_nobody
        """Says a line in the log, of what goes wrong and is tried again; the registry sets it."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Values of one step, by the names of ``calib/records/run_values.py``.

        ``unix_s`` is when it ended; a constant comes once, and again where it has changed.
        """

    def tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """The tables of an answer, one mapping per row: numbers, text, and None for nothing."""

    def score(self, summary: Mapping[str, Any]) -> None:
        """What the predictions are worth so far, every few seconds."""

    def alert(self, title: str, text: str) -> None:
        """Tell the user now."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """The run is over; ``summary`` is what its predictions were worth."""
