"""What the hooks cost: hooked against bare steps of the same window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import CalibrationError

_SEED = 20250929
"""Any: the same steps give the same interval."""
_NUM_RESAMPLES = 2000
"""Twice the thousand that percentile intervals ask for (Efron and Tibshirani, 1993, 13.3)."""
_MIN_STEPS = 2
"""One difference has no scatter."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Extra time of a hooked step as a share of a bare one, with a 90 % interval."""

    overhead_frac: float
    low_frac: float
    high_frac: float
    num_hooked: int
    num_bare: int


def overhead(step_times_s: ArrayLike, is_hooked: ArrayLike, *, seed: int = _SEED) -> Overhead:
    """Median difference of neighbouring hooked and bare steps over the median bare step.

    ``step_times_s`` are in the order in which the steps ran.  Each hooked step is held against the
    mean of its nearest bare steps before and after, so that a slow trend cancels; the interval is a
    bootstrap over these differences (percentiles, fixed seed): the same input, the same answer.
    Raises ``CalibrationError`` below two steps of either kind.
    """
    times = np.asarray(step_times_s, dtype=np.float64)
    hooked = np.asarray(is_hooked, dtype=bool)
    num_hooked, num_bare = int(hooked.sum()), int((~hooked).sum())
    if min(num_hooked, num_bare) < _MIN_STEPS:
        raise CalibrationError(
            f"{num_hooked} hooked and {num_bare} bare steps are too few; "
            f"record at least {_MIN_STEPS} of each"
        )
    differences = _differences(times, hooked)
    bare = float(np.median(times[~hooked]))
    random = np.random.default_rng(seed)
    picks = random.integers(differences.size, size=(_NUM_RESAMPLES, differences.size))
    medians = np.median(differences[picks], axis=1)
    # A bootstrap of few values is too narrow by sqrt((n - 1) / n).
    centre = float(np.median(differences))
    widen = (differences.size / (differences.size - 1)) ** 0.5
    low, high = centre + widen * (np.quantile(medians, [0.05, 0.95]) - centre)
    return Overhead(
        overhead_frac=centre / bare,
        low_frac=float(low) / bare,
        high_frac=float(high) / bare,
        num_hooked=num_hooked,
        num_bare=num_bare,
    )


def _differences(times: Floats, hooked: NDArray[np.bool_]) -> Floats:
    bare = np.flatnonzero(~hooked)
    out = []
    for place in np.flatnonzero(hooked):
        after = int(np.searchsorted(bare, place))
        near = [int(bare[i]) for i in (after - 1, after) if 0 <= i < bare.size]
        out.append(times[place] - np.mean(times[near]))
    return np.asarray(out)
