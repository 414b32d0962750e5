"""Interval for the next single step, adapted to its past coverage.

Adaptive conformal inference (Gibbs and Candes, 2021, section 2): after each step the level of
misses moves by ``rate * (target - missed)``, so that the long-run coverage is right for any
sequence of steps.  Each side has a separate level, since slow steps are more frequent than fast
ones.
"""

from __future__ import annotations

import math
import sys
from collections import deque

import numpy as np
from numpy.typing import NDArray

# 50 or 200 change the width of the interval by 1 to 4 %, and its coverage not at all.
NUM_RECENT = 100
"""Number of newest steps that the interval is taken from."""
NUM_FIRST = 20
"""Fewest steps for an interval."""
MISSED_FRAC = 0.05
"""Target share of misses on each side."""
# On autocorrelated steps with and without a planted change 0.005 to 0.08 all cover 90 %; the
# interval is 1 % wider at 0.04 and 6 % at 0.08.
RATE = 0.02
# Minimum for identical steps, which have no spread: one thousandth.
_MIN_SPREAD_LOG = 1e-3
_MOST_LOG = math.log(sys.float_info.max)


class AdaptiveInterval:
    """90 % interval of the next step, updated with each step.

    >>> known = AdaptiveInterval()
    >>> known.interval() is None
    True
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)
        self._low_frac = self._high_frac = MISSED_FRAC

    def interval(self) -> tuple[float, float] | None:
        """Return the interval in seconds; None while there are too few steps."""
        if len(self._recent) < NUM_FIRST:
            return None
        logs = np.asarray(self._recent)
        low = -_upper(-logs, self._low_frac)
        high = min(_upper(logs, self._high_frac), _MOST_LOG)
        return math.exp(min(low, high)), math.exp(high)

    def add(self, time_s: float) -> None:
        """Add an unflagged step; times that are not positive and finite are ignored."""
        if not time_s > 0 or not math.isfinite(time_s):
            return
        expected = self.interval()
        if expected is not None:
            low_s, high_s = expected
            self._low_frac = _moved(self._low_frac, is_missed=time_s < low_s)
            self._high_frac = _moved(self._high_frac, is_missed=time_s > high_s)
        self._recent.append(math.log(time_s))


def _moved(frac: float, *, is_missed: bool) -> float:
    moved = frac + RATE * (MISSED_FRAC - is_missed)
    # Below 0 the interval exceeds the observed range; at 0.5 its end is the median.
    return min(0.5, max(-0.5, moved))


def _upper(logs: NDArray[np.float64], frac: float) -> float:
    """Return the value that a share ``frac`` of future values exceeds (conformal quantile, n + 1).

    Beyond the range that n values determine, extrapolate from the largest by its distance from the
    median.
    """
    count = logs.size
    rank = (1.0 - frac) * (count + 1)
    if rank <= count:
        return float(np.quantile(logs, max(0.0, (rank - 1.0) / (count - 1.0))))
    largest, middle = float(logs.max()), float(np.median(logs))
    reach = max(largest - middle, _MIN_SPREAD_LOG)
    return largest + reach * (rank - count) / (count + 1) * 4.0
