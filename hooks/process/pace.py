"""The pace of work in threads beside training, which share its interpreter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

SLICE_S = 0.001
PAUSE_S = 0.02
"""On an H200 whose steps of 60 ms waited for Python a millisecond in five made them 12 to 27 %
longer while it lasted, one in twenty-one 3 to 8 % (``benchmarks/RESULTS.md``, On a GPU)."""
_Item = TypeVar("_Item")


class Pace:
    """A short slice of work, then a pause in which training has the interpreter to itself."""

    def __init__(self, pause: Callable[[float], None] = time.sleep) -> None:
        self._pause = pause
        self._begin_s = 0.0

    def keep(self) -> None:
        """Pause where a slice is over; to be called between small pieces of work."""
        if time.perf_counter() - self._begin_s > SLICE_S:
            self._pause(PAUSE_S)
            self._begin_s = time.perf_counter()

    def over(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The same items, with pauses between them."""
        self._begin_s = time.perf_counter()
        for item in items:
            yield item
            self.keep()
