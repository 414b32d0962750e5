"""Which other layouts would tell most about all of them, were they measured for a few steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..fit.choices import first_of_least

_NOISE_SIGMA_LOG = 0.02
"""How well a few steps tell the ratio of two layouts."""


def most_telling(slopes: Sequence[Mapping[str, float]], number: int) -> list[int]:
    """Places of the layouts to measure, the most telling first.

    ``slopes`` holds for each layout how the log of its time over the running one changes when one
    family of models is off by one standard deviation.  Greedy I-optimal design (Atkinson, Donev &
    Tobias 2007, section 10.6): each choice takes most off the mean variance of all ratios.  Layouts
    that would tell nothing are left out.

    >>> most_telling([{"tp": 0.3}, {"tp": 0.1}, {"pp": 0.2}], 2)
    [0, 2]
    """
    names = sorted({name for one in slopes for name in one})
    matrix = np.array([[one.get(name, 0.0) for name in names] for one in slopes])
    if not matrix.size:
        return []
    covariance = matrix @ matrix.T
    chosen: list[int] = []
    for _ in range(min(number, len(slopes))):
        variance = np.diag(covariance)
        gain = np.sum(covariance**2, axis=0) / (variance + _NOISE_SIGMA_LOG**2)
        gain[chosen] = -1.0
        best = first_of_least(-gain)
        if variance[best] < _NOISE_SIGMA_LOG**2:
            break
        chosen.append(best)
        column = covariance[:, best] / (variance[best] + _NOISE_SIGMA_LOG**2)
        covariance = covariance - np.outer(column, covariance[best])
    return chosen
