"""Pauses of the threads that run concurrently with training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

SLICE_S = 0.001
PAUSE_S = 0.02
"""Pause after each slice.  On an H200 with host-bound steps of 60 ms, working one millisecond in
five made steps 12 to 27 % longer meanwhile, one in twenty-one 3 to 8 % (``benchmarks/RESULTS.md``,
On a GPU)."""
_Item = TypeVar("_Item")


class Pacer:
    """Alternates short slices of work with pauses that leave the interpreter to training."""

    def __init__(self, pause: Callable[[float], None] = time.sleep) -> None:
        self._pause = pause
        self._begin_s = 0.0

    def keep(self) -> None:
        """Pause if a slice is over; to be called between small pieces of work."""
        if time.perf_counter() - self._begin_s > SLICE_S:
            self._pause(PAUSE_S)
            self._begin_s = time.perf_counter()

    def over(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield the same items, with pauses between them."""
        self._begin_s = time.perf_counter()
        for item in items:
            yield item
            self.keep()
