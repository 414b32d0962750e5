"""What each window was worth: errors of the next window's step and of the finish, by what was known
before the window and with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any

from .history import WindowError


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowScore:
    """A window, its own errors and those of what lay ahead of it."""

    error: WindowError
    next_before_frac: float | None
    """The next window's step by the models before this one, over the measured one, minus one; None
    where there were none, or no next window yet."""
    next_after_frac: float | None
    """The same by the models refitted with this window."""
    finish_before_frac: float | None
    """The finish by models and levels of the windows before, at the moment when this one closed:
    how much too late it is, over the time of the whole run.  None where none was foretold."""
    finish_after_frac: float | None
    """The same by those with this window."""

    def to_json(self) -> dict[str, Any]:
        """A flat JSON object."""
        own = {one.name: getattr(self.error, one.name) for one in fields(WindowError)}
        names = ("next_before_frac", "next_after_frac", "finish_before_frac", "finish_after_frac")
        return own | {name: getattr(self, name) for name in names}


def window_scores(
    errors: Sequence[WindowError], *, started_unix_s: float, finish_unix_s: float
) -> list[WindowScore]:
    """A score for each window, oldest first.

    ``finish_unix_s`` is the end of the run, or while that is to come the newest forecast of it.
    """
    total_s = finish_unix_s - started_unix_s

    def late_frac(foretold_unix_s: float | None) -> float | None:
        if foretold_unix_s is None or total_s <= 0:
            return None
        return (foretold_unix_s - finish_unix_s) / total_s

    def next_frac(modelled_s: float | None, following: WindowError | None) -> float | None:
        if modelled_s is None or following is None:
            return None
        return modelled_s / following.measured_s - 1

    return [
        WindowScore(
            error=error,
            next_before_frac=next_frac(error.modelled_before_s, following),
            next_after_frac=next_frac(error.modelled_after_s, following),
            finish_before_frac=late_frac(error.finish_before_unix_s),
            finish_after_frac=late_frac(error.finish_after_unix_s),
        )
        for error, following in zip_longest(errors, errors[1:])
    ]
