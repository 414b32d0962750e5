"""A line through the larger half of samples: what trees, flat beyond their last split, cannot say.

Trees end in the mean of a few samples at the edge of their range, and which these are changes with
any split.  A ridge line of many is steady where it is asked far outside, and is never asked inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
_RIDGE = 30.0
"""Samples that the prior of no slope counts for, in each direction: a tenth of what pools of trees
have at least in their larger half."""
_FRAC = 0.5
"""Of what is said beyond the samples: from small to large products of A100 and H100 trees alone are
off by 8.6 %, both together by 7.7, the line alone by more than either."""
_LEAST_DEVIATION = 1e-9
"""Of a feature; one that does not vary has no slope."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Line:
    """Values by features, ``(features,)`` each, held at the ends of the samples' range."""

    intercept: float
    slopes: Vector
    """Change of the value with one feature's deviation."""
    middle: Vector
    deviation: Vector
    lowest: Vector
    highest: Vector

    def predict(self, features: NDArray[np.float64]) -> Vector:
        """Values, ``(rows,)``."""
        inside = np.clip(features, self.lowest, self.highest)
        return self.intercept + (inside - self.middle) / self.deviation @ self.slopes

    def joined(self, features: NDArray[np.float64], by_trees: Vector) -> Vector:
        """What trees say, ``(rows,)``, and from a doubling beyond their samples half of it this."""
        frac = _FRAC * np.minimum(self.octaves_beyond(features), 1.0)
        return by_trees + frac * (self.predict(features) - by_trees)

    def octaves_beyond(self, features: NDArray[np.float64]) -> Vector:
        """Doublings beyond the largest sample in the first feature, a natural log, ``(rows,)``."""
        return np.maximum(features[:, 0] - self.highest[0], 0.0) / np.log(2.0)


def fit_line(features: NDArray[np.float64], values: Vector) -> Line:
    """The ridge line of the samples that are above the median in the first feature.

    >>> x = np.column_stack([np.arange(100.0), np.zeros(100)])
    >>> line = fit_line(x, 0.5 * np.maximum(x[:, 0], 50.0))
    >>> line.predict(np.array([[74.5, 0.0]])).tolist()
    [37.25]
    """
    middle, deviation = features.mean(axis=0), features.std(axis=0)
    deviation = np.maximum(deviation, _LEAST_DEVIATION)
    large = features[:, 0] >= np.median(features[:, 0])
    scaled = (features[large] - middle) / deviation
    center, level = scaled.mean(axis=0), float(values[large].mean())
    moved = scaled - center
    normal = moved.T @ moved + _RIDGE * np.eye(moved.shape[1])
    slopes = np.linalg.solve(normal, moved.T @ (values[large] - level))
    return Line(
        intercept=level - float(center @ slopes),
        slopes=slopes,
        middle=middle,
        deviation=deviation,
        lowest=features.min(axis=0),
        highest=features.max(axis=0),
    )
