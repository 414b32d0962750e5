"""Choices between candidates whose scores are sums: the last digits must not decide."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ALIKE, _ALIKE_FRAC = 1e-12, 1e-6
"""Scores that differ by less are the same: processors round sums otherwise."""
_BITS = 20
"""Fine enough to change no choice, coarse enough that sums of a few thousand values carry no
rounding."""


def first_of_least(scores: Sequence[float] | NDArray[np.float64], *, alike: float = 0.0) -> int:
    """Place of the first score that is the least or as good as that: order candidates by size.

    As good is what lies within ``alike``, or within a millionth of the least.

    >>> first_of_least([2.0, 1.0 + 1e-9, 1.0]), first_of_least([1.05, 1.0], alike=0.1)
    (1, 0)
    """
    values = np.asarray(scores, dtype=np.float64)
    least = values.min()
    return int(np.argmax(values <= least + max(alike, _ALIKE, _ALIKE_FRAC * abs(float(least)))))


def on_grid(values: ArrayLike) -> NDArray[np.float64]:
    """Values rounded to multiples of 2**-20, a millionth: sums of a few thousand are exact.

    >>> float(on_grid(0.1 + 1e-12) - on_grid(0.1))
    0.0
    """
    return np.round(np.asarray(values, dtype=np.float64) * 2.0**_BITS) / 2.0**_BITS
