"""Windows that have closed: the newest waits for its answer, the others are passed over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...hooks.process import RESTART_WINDOWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A window that waits for its answer."""

    window: int
    last_iteration: int
    since_unix_s: float
    is_again: bool = False
    """It had its answer; probes have come since."""


class ClosedWindows:
    """Takes windows as they close, and counts those that closed while another was analysed."""

    def __init__(self) -> None:
        self.waiting: Closed | None = None
        self._newest = -1
        self._skipped: list[int] = []

    def close(self, event: dict[str, Any], now_unix_s: float, *, is_probed: bool = False) -> None:
        """A window has closed, or was probed after that; it takes the place of one that waits."""
        window, waiting = int(event["window"]), self.waiting
        if is_probed and waiting is not None and waiting.window > window:
            return  # the answer of that window has these probes as well
        start = window - window % RESTART_WINDOWS
        if waiting is not None and waiting.window < start:  # the loop was begun again
            self._skipped = [*self._skipped_before(waiting.window), waiting.window]
            self._newest = waiting.window
        self.waiting = Closed(
            window=window,
            last_iteration=int(event["last_step"]) + 1,
            since_unix_s=now_unix_s,
            is_again=is_probed and waiting is None,
        )

    def settle(self) -> None:
        """The window that waits is done with, with an answer or without."""
        if self.waiting is not None:
            self._skipped = self._skipped_before(self.waiting.window)
            self._newest = self.waiting.window
        self.waiting = None

    def problems(self) -> tuple[str, ...]:
        """A line for the answer of the one that waits on what was passed over so far; maybe none.

        >>> windows = ClosedWindows()
        >>> for window in (0, 3):
        ...     windows.settle()
        ...     windows.close({"window": window, "last_step": 10}, 0.0)
        ...     [problem.partition(":")[0] for problem in windows.problems()]
        []
        ['2 windows have no answer of their own, the last of them window 2']
        >>> windows.close({"window": RESTART_WINDOWS, "last_step": 10}, 0.0)  # begun again
        >>> windows.problems()[0].partition(":")[0]
        '3 windows have no answer of their own, the last of them window 3'
        """
        skipped = [] if self.waiting is None else self._skipped_before(self.waiting.window)
        if not skipped:
            return ()
        count = "1 window has" if len(skipped) == 1 else f"{len(skipped)} windows have"
        return (
            f"{count} no answer of their own, the last of them window {skipped[-1]}: an earlier "
            "window was still being analysed; this answer includes their samples",
        )

    def counts(self) -> dict[str, int]:
        """For the score."""
        return {"num_skipped_windows": len(self._skipped)} if self._skipped else {}

    def _skipped_before(self, window: int) -> list[int]:
        first = max(self._newest + 1, window - window % RESTART_WINDOWS)
        return [*self._skipped, *range(first, window)]
