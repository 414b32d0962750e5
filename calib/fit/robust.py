"""Least squares in which a few wild samples do not pull the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Vector = NDArray[np.float64]


def robust_minimum(
    residuals: Callable[[Vector], Vector], jacobian: Callable[[Vector], Vector], start: Vector
) -> Vector:
    """Parameters at the least sum of soft-L1 residuals, each counted in standard deviations."""
    # SciPy's signature names only the default of ``jac``, a string; a callable is documented.
    derivative: Any = jacobian
    return np.asarray(least_squares(residuals, start, jac=derivative, loss="soft_l1").x)
