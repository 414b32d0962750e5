"""Least squares and deviations in which a few wild samples do not pull the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..samples import MAD_TO_SIGMA

Vector = NDArray[np.float64]
_FARTHEST_LOG = 20.0
"""A factor of half a billion: no constant of a machine lies that far from its prior."""
_INSIDE_LOG = 1e-3
"""A search begins inside its bounds."""
_WILD_DEVIATIONS = 4.0
"""Residuals are cut here (robust deviations). Two or eight instead move coverage of another device
by a point (benchmarks/sensitivity.py)."""
SAMPLE_SIGMA_LOG = 0.06
"""How far one measured operator, probe or transfer lies from a law.  At 0.1 instead, large bf16
products are predicted from small ones to 9.8 % instead of 7.2."""
_LEAST_SIGMA = 0.005
"""Half a percent: no operator repeats itself better."""


def robust_minimum(
    residuals: Callable[[Vector], Vector],
    jacobian: Callable[[Vector], Vector],
    start: Vector,
    *,
    spread: Vector,
    lowest: Vector | None = None,
    loss: Literal["soft_l1", "linear"] = "soft_l1",
    tolerance: float = 1e-12,
    most_steps: int = 200,
) -> Vector:
    """Logs of constants at the least sum of residuals, each counted in standard deviations.

    ``spread`` are the constants' own deviations, in which steps are counted; none ends below
    ``lowest``.  By default the search goes on until steps are lost in rounding: other processors
    stop at the same place.
    """
    from scipy.optimize import least_squares  # slow to import, and fitting alone needs it

    # SciPy's signature names only the default of ``jac``, a string; a callable is documented.
    derivative: Any = jacobian
    least = np.full(len(start), -np.inf) if lowest is None else lowest
    first = np.maximum(start, least + _INSIDE_LOG)
    found = least_squares(
        residuals,
        first,
        jac=derivative,
        bounds=(np.maximum(first - _FARTHEST_LOG, least), first + _FARTHEST_LOG),
        x_scale=spread,
        loss=loss,
        ftol=tolerance,
        xtol=tolerance,
        gtol=tolerance,
        max_nfev=most_steps,
    )
    return np.asarray(found.x)


def without_wild(residuals: Vector) -> Vector:
    """Sizes of residuals, the wild ones cut to four median deviations, ``(rows,)``."""
    size = np.abs(residuals)
    middle = float(np.median(size)) if len(size) else 0.0
    return np.minimum(size, _WILD_DEVIATIONS * MAD_TO_SIGMA * max(middle, _LEAST_SIGMA))


def robust_sigma(residuals: Vector) -> float:
    """Root mean square of residuals without wild ones, at least 0.5 %."""
    return max(float(np.sqrt(np.mean(without_wild(residuals) ** 2))), _LEAST_SIGMA)
