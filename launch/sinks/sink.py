"""What a sink is: a place outside the directory that the values of a run go to while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


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

    def alert(self, title: str, text: str) -> None:
        """Tell the user now."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """The run is over; ``summary`` is what its predictions were worth."""
