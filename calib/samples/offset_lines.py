"""A straight line through intervals: offset and drift of a clock, with what bounds them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_DRIFT_FRAC = 500e-6
"""Largest error of frequency that NTP corrects (RFC 5905, section 11.1)."""
# Pairs grow with the square: 24 moments are 276 lines, spread over the window.
_MOST_TRIED = 24
# Clocks count whole nanoseconds.
_SLACK_S = 1e-9
# Zero needs a majority: half of the moments may be bounded by records that lie.
_LEAST_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Bounds of the offsets; ``at_s`` is (moments,), the others (moments, ranks) or (moments,)."""

    at_s: Floats
    low_s: Floats
    high_s: Floats

    def of(self, place: int) -> Moments:
        """Those of one rank in the moments that bound it from both sides."""
        low, high = self.low_s[:, place], self.high_s[:, place]
        known = np.isfinite(low) & np.isfinite(high)
        return Moments(at_s=self.at_s[known], low_s=low[known], high_s=high[known])

    def only(self, keep: NDArray[np.bool_]) -> Moments:
        """A choice of the moments of one rank."""
        return Moments(at_s=self.at_s[keep], low_s=self.low_s[keep], high_s=self.high_s[keep])

    def admits(self, offset_s: Floats | float) -> NDArray[np.bool_]:
        """Where an offset, one for all moments or one each, lies within the bounds."""
        return (self.low_s - _SLACK_S <= offset_s) & (offset_s <= self.high_s + _SLACK_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The offset in mid-window between ``low_s`` and ``high_s``, and its change per second."""

    offset_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    drift_frac: float = 0.0
    num_moments: int = 0
    num_dropped: int = 0
    is_reached: bool = False
    is_zero: bool = False
    """Most moments admit the offset ``zero_s``, and without drift."""


def fit_line(moments: Moments, middle_s: float, *, zero_s: float = 0.0) -> Line:
    """The middle of all lines that the moments admit; moments that contradict most are dropped."""
    if not len(moments.at_s):
        return Line()
    kept = moments
    ranges = _ranges(kept, middle_s)
    if ranges is None:
        kept = moments.only(_most_agreed(moments))
        ranges = _ranges(kept, middle_s)
    if ranges is None:
        return Line(num_dropped=len(moments.at_s))
    (low, high), (slow, fast) = ranges
    num_zero = int(moments.admits(zero_s).sum())
    is_zero = num_zero >= max(len(kept.at_s), _LEAST_SHARE * len(moments.at_s))
    kept_now = num_zero if is_zero else len(kept.at_s)
    return Line(
        offset_s=(low + high) / 2,
        low_s=min(low, zero_s) if is_zero else low,
        high_s=max(high, zero_s) if is_zero else high,
        drift_frac=(slow + fast) / 2 if len(kept.at_s) > 1 else 0.0,
        num_moments=kept_now,
        num_dropped=len(moments.at_s) - kept_now,
        is_reached=True,
        is_zero=is_zero,
    )


def _ranges(
    moments: Moments, middle_s: float
) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Least and greatest offset at the middle, and drift; None where no line fits."""
    from scipy.optimize import linprog  # slow to import, and only clocks need it

    # Centred and scaled: the solver's tolerance is absolute.
    center = float(np.median((moments.low_s + moments.high_s) / 2))
    scale = max(float(np.max(moments.high_s - moments.low_s)), _SLACK_S)
    time = moments.at_s - middle_s
    reach = max(float(np.max(np.abs(time))), _SLACK_S)
    low, high = (moments.low_s - center) / scale, (moments.high_s - center) / scale
    one = np.ones_like(time)
    sides = np.vstack([np.column_stack([one, time / reach]), -np.column_stack([one, time / reach])])
    limits = np.concatenate([high, -low]) + _SLACK_S / scale
    steepest = MAX_DRIFT_FRAC * reach / scale
    out = []
    for column, unit in ((0, scale), (1, scale / reach)):
        ends = []
        for sign in (1.0, -1.0):
            goal = np.zeros(2)
            goal[column] = sign
            found = linprog(
                goal, A_ub=sides, b_ub=limits, bounds=[(None, None), (-steepest, steepest)]
            )
            if found.status != 0:
                return None
            ends.append(float(found.x[column]) * unit)
        out.append((ends[0], ends[1]))
    (first, last), drift = out
    return (first + center, last + center), drift


def _most_agreed(moments: Moments) -> NDArray[np.bool_]:
    """The moments that the best line admits, of all lines through the middles of two moments."""
    middle = (moments.low_s + moments.high_s) / 2
    tried = np.unique(np.linspace(0, len(middle) - 1, min(len(middle), _MOST_TRIED)).astype(int))
    best = np.zeros(len(middle), dtype=bool)
    for place in tried.tolist():
        agreed = moments.admits(middle[place])
        best = agreed if agreed.sum() > best.sum() else best
    for i, j in combinations(tried.tolist(), 2):
        slope = (middle[j] - middle[i]) / max(moments.at_s[j] - moments.at_s[i], _SLACK_S)
        if abs(slope) > MAX_DRIFT_FRAC:
            continue
        agreed = moments.admits(middle[i] + slope * (moments.at_s - moments.at_s[i]))
        best = agreed if agreed.sum() > best.sum() else best
    return best
