"""Least squares in which a few wild samples do not pull the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Vector = NDArray[np.float64]
_STEP = 1e-5


def robust_minimum(
    residuals: Callable[[Vector], Vector], jacobian: Callable[[Vector], Vector], start: Vector
) -> Vector:
    """Parameters at the least sum of soft-L1 residuals, each counted in standard deviations."""
    # SciPy's signature names only the default of ``jac``, a string; a callable is documented.
    derivative: Any = jacobian
    return np.asarray(least_squares(residuals, start, jac=derivative, loss="soft_l1").x)


def forward_differences(residuals: Callable[[Vector], Vector]) -> Callable[[Vector], Vector]:
    """The jacobian of residuals in parameters of order one, by small steps of each.

    >>> forward_differences(lambda x: x**2)(np.array([1.0, 3.0])).round(3).tolist()
    [[2.0, 0.0], [0.0, 6.0]]
    """

    def jacobian(theta: Vector) -> Vector:
        base = residuals(theta)
        moved = [residuals(theta + _STEP * unit) for unit in np.eye(len(theta))]
        return np.column_stack([(m - base) / _STEP for m in moved])

    return jacobian
