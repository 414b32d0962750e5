"""What a verb tells the shell."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the shell sees."""

    ANSWER = 0
    THRESHOLD = 1
    USAGE = 2
    NO_DATA = 3
