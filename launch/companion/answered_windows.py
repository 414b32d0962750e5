"""Which windows of a run have had their answer; those that closed meanwhile are passed over."""

from __future__ import annotations


class AnsweredWindows:
    """Counts the windows that closed while an earlier one was analysed."""

    def __init__(self) -> None:
        self._newest = -1
        self._last_skipped = -1
        self._num_skipped = 0

    def settled(self, window: int) -> None:
        """A window is done with, with an answer or without."""
        self._note(window)
        self._newest = window

    def problems(self, window: int) -> tuple[str, ...]:
        """A line for the answer of ``window`` on what was passed over so far; maybe none.

        >>> answered = AnsweredWindows()
        >>> answered.settled(0)
        >>> answered.problems(1)
        ()
        >>> answered.problems(3)[0].partition(":")[0]
        '2 windows have no answer of their own, the last of them window 2'
        """
        num, last = self._skipped_before(window)
        if not num:
            return ()
        count = "1 window has" if num == 1 else f"{num} windows have"
        return (
            f"{count} no answer of their own, the last of them window {last}: they closed while an "
            f"earlier one was analysed, and their samples are in this answer",
        )

    def counts(self) -> dict[str, int]:
        """For the score."""
        return {"num_skipped_windows": self._num_skipped} if self._num_skipped else {}

    def _note(self, window: int) -> None:
        self._num_skipped, self._last_skipped = self._skipped_before(window)

    def _skipped_before(self, window: int) -> tuple[int, int]:
        num = max(0, window - self._newest - 1)
        return self._num_skipped + num, window - 1 if num else self._last_skipped
