"""Text of batch scripts: the mark of those that we wrote, comments, and Slurm's time."""

from __future__ import annotations

import math

MARK = "# Written by forerun"
_MOST_CHARS = 2000


def one_line(text: str) -> str:
    """Return a text without line breaks and control characters, cut to ``_MOST_CHARS``."""
    words = "".join(c if c.isprintable() else " " for c in text[: 4 * _MOST_CHARS]).split()
    return " ".join(words)[:_MOST_CHARS]


def time_option(time_s: float) -> str:
    """Return the value of ``--time`` for ``time_s`` seconds, rounded up to a quarter of an hour.

    >>> time_option(93600.0 - 1.0), time_option(60.0)
    ('1-02:00:00', '00:15:00')
    """
    minutes = max(1, math.ceil(time_s / 900.0)) * 15  # schedulers backfill gaps of round lengths
    days, minutes = divmod(minutes, 1440)
    text = f"{minutes // 60:02d}:{minutes % 60:02d}:00"
    return f"{days}-{text}" if days else text
