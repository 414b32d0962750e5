"""The companion asks before it takes memory: all that it has counts in training's control group."""

from __future__ import annotations

from collections.abc import Callable

from ...hooks.process.free_memory import LEAST_NBYTES, free_nbytes

LOAD_NBYTES = 256 << 20
"""Free memory for loading libraries and the first fit (docs/touches.md has the measurement)."""
FIT_NBYTES = 96 << 20
"""Free memory for another fit."""


class MemoryGuard:
    """Tells whether there is memory for an answer; says once that the companion waits for it."""

    def __init__(
        self, notify: Callable[[str], object], free: Callable[[], int] = free_nbytes
    ) -> None:
        self._notify, self._free = notify, free
        self._has_notified = False

    def allows(self, nbytes: int) -> bool:
        """Return True if so much is free."""
        free = self._free()
        if free < nbytes and not self._has_notified:
            self._has_notified = True
            self._notify(
                f"no answer yet: {free >> 20} MiB are free within this job's memory limit and an "
                f"answer takes up to {nbytes >> 20}; records are kept, and an answer follows once "
                "so much is free"
            )
        return free >= nbytes

    def is_short(self) -> bool:
        """Return True, with a message, if training may need what this process holds."""
        free = self._free()
        if free < LEAST_NBYTES:
            self._notify(
                f"no more live answers: {free >> 20} MiB are free within this job's memory limit, "
                "so the companion ends; training goes on, and records are kept for forerun report"
            )
        return free < LEAST_NBYTES
