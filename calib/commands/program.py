"""The program of a launch line: its words in another layout, and what words cannot say."""

from __future__ import annotations

from dataclasses import dataclass

from .words import Word


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The script and its arguments."""

    words: tuple[Word, ...]
    notes: tuple[str, ...] = ()
    """What a user has to do or know, one sentence each."""
