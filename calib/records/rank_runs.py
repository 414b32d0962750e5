"""The members of a group as text, as runs: a group may have 16,384 ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..errors import RecordError

MAX_RANKS = 1 << 20
"""More is damage, not a group."""


@lru_cache(maxsize=256)
def to_runs(ranks: tuple[int, ...]) -> str:
    """Runs ``first-last`` or ``first-last:stride``, and single ranks, joined by commas.

    >>> to_runs((0, 1, 2, 3)), to_runs((5, 13, 21)), to_runs((0, 1, 2, 8, 9, 10)), to_runs((7, 3))
    ('0-3', '5-21:8', '0-2,8-10', '7,3')
    """
    parts, at = [], 0
    while at < len(ranks):
        length = _run_length(ranks, at)
        # Two ranks as a run are no shorter.
        if length < 3:
            parts.append(str(ranks[at]))
            at += 1
            continue
        stride = ranks[at + 1] - ranks[at]
        tail = "" if stride == 1 else f":{stride}"
        parts.append(f"{ranks[at]}-{ranks[at + length - 1]}{tail}")
        at += length
    return ",".join(parts)


@lru_cache(maxsize=256)
def from_runs(text: str) -> tuple[int, ...]:
    """The ranks that ``to_runs`` was given; the same object for the same text.

    Raises ``RecordError`` where it is no such text.

    >>> from_runs("0-2,5-21:8")
    (0, 1, 2, 5, 13, 21)
    """
    ranks: list[int] = []
    for part in text.split(","):
        bounds, _, stride = part.partition(":")
        first, _, last = bounds.partition("-")
        numbers = (first, last or first, stride or "1")
        if not all(n.isascii() and n.isdigit() for n in numbers):
            raise RecordError(f"ranks {text[:40]!r} are no runs such as 0-7,16-30:2; skipped")
        begin, end, step = map(int, numbers)
        if not step or end < begin or (end - begin) // step + len(ranks) >= MAX_RANKS:
            raise RecordError(f"ranks {text[:40]!r} are no runs such as 0-7,16-30:2; skipped")
        ranks.extend(range(begin, end + 1, step))
    return tuple(ranks)


def _run_length(ranks: Sequence[int], at: int) -> int:
    """Entries from ``at`` on that rise by one same stride."""
    if at + 1 >= len(ranks) or ranks[at + 1] <= ranks[at]:
        return 1
    stride, end = ranks[at + 1] - ranks[at], at + 2
    while end < len(ranks) and ranks[end] - ranks[end - 1] == stride:
        end += 1
    return end - at
