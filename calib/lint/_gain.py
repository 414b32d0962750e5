"""The gain of a remedy: time and memory, with an interval."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import check_ascending
from ..units import format_bytes, format_change, format_frac

LEAST_MEMORY_FRAC = 0.05
"""Smallest saving that is mentioned, as a share of a rank's memory peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A change of time, with its 90 % interval; below 0 is less."""

    time_frac: float
    low_frac: float
    high_frac: float
    of_run: bool = False
    """True if the change is of the whole run, not of a step."""
    memory_nbytes: int = 0
    """Change of a rank's memory peak."""
    memory_frac: float = 0.0
    """Change over that peak."""

    def __post_init__(self) -> None:
        check_ascending("change of time", -1.0, self.low_frac, self.time_frac, self.high_frac)

    @property
    def is_sure(self) -> bool:
        """True if the interval excludes a gain of zero."""
        return self.high_frac < 0

    @property
    def text(self) -> str:
        """The gain in words, its interval in brackets.

        >>> Gain(time_frac=-0.06, low_frac=-0.08, high_frac=-0.04).text
        'about 6 % less per step (4 to 8)'
        """
        time = format_change(
            self.time_frac,
            self.low_frac,
            self.high_frac,
            of="of the run" if self.of_run else "per step",
            digits=0 if self.time_frac <= -0.02 else 1,
        )
        text = f"about {time}" if self.is_sure else time
        if self.low_frac < 0 < self.high_frac:
            text += f", {format_frac(self.time_frac, signed=True)} expected"
        if self.memory_frac > -LEAST_MEMORY_FRAC:
            return text
        return f"{text}, {format_bytes(-self.memory_nbytes)} less memory"
