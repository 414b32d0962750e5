"""One measured time: what a fit learns from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A time measured on this run, windows joined."""

    time_s: float
    sigma_log: float
    """Standard deviation of its logarithm if it were measured again."""
    weight: float
    num_rows: int
    is_bound: bool = False
    """Known from above only: the transfer had ended before anybody looked."""
    is_probe: bool = False
    """Measured between steps only."""
