"""Fits, deviations and choices that are robust to a few outliers and to rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..samples.reduce import MAD_TO_SIGMA

Vector = NDArray[np.float64]
_FARTHEST_LOG = 20.0
"""Bound on the distance of a machine's constant from its prior: a factor of half a billion."""
_INSIDE_LOG = 1e-3
"""Distance from the bounds at which a search starts."""
_WILD_DEVIATIONS = 4.0
"""Robust deviations at which residuals are clipped. Two or eight instead change coverage of another
device by a point (benchmarks/RESULTS.md)."""
SAMPLE_SIGMA_LOG = 0.06
"""Deviation of one measured operator, probe or transfer from a law. At 0.1 instead, large bf16
products are predicted from small ones to 9.8 % instead of 7.2."""
_LEAST_SIGMA = 0.005
"""Half a percent: no operator repeats itself more precisely."""


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
    """Return the logs of constants that minimise the residuals, each in units of its standard
    deviation.

    ``spread`` are the constants' own deviations, the unit of steps; none ends below ``lowest``. By
    default the search continues to the level of rounding, so that other processors stop at the same
    point.
    """
    from scipy.optimize import least_squares  # slow to import, and only fitting needs it

    # SciPy's signature declares only the default of ``jac``, a string; a callable is documented.
    derivative: Any = jacobian
    least = np.full(len(start), -np.inf) if lowest is None else lowest
    first = np.maximum(start, least + _INSIDE_LOG)
    solution = least_squares(
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
    return np.asarray(solution.x)


def clip_residuals(residuals: Vector) -> Vector:
    """Return the sizes of residuals, with outliers clipped to four median deviations,
    ``(rows,)``."""
    size = np.abs(residuals)
    middle = float(np.median(size)) if len(size) else 0.0
    return np.minimum(size, _WILD_DEVIATIONS * MAD_TO_SIGMA * max(middle, _LEAST_SIGMA))


def robust_sigma(residuals: Vector) -> float:
    """Return the root mean square of clipped residuals, at least 0.5 %."""
    return max(float(np.sqrt(np.mean(clip_residuals(residuals) ** 2))), _LEAST_SIGMA)


PRIOR_WEIGHT = 5.0
"""Residuals that the prior is worth: with it 90 % intervals covered 91 % on public step times."""
UNMEASURED_SIGMA_LOG = 0.5
"""Error of an operator whose kind was never measured."""
Z_90 = 1.6448536269514722
"""95 % quantile of the normal distribution."""
STUDENT_90 = 1.8945786051
"""Half of a 90 % interval of Student's t with 7 degrees, over the model's own deviation."""
_TAIL_FACTOR = STUDENT_90 / Z_90
"""Factor from a normal 90 % interval to that of Student's t with 7 degrees."""


def shrunk_sigma_log(residuals: NDArray[np.float64], *, prior_sigma_log: float) -> float:
    """Return the deviation of held-out residuals of log time, shrunk to the prior if they are few.

    It is widened so that a normal 90 % interval is Student's with 7 degrees.

    >>> round(shrunk_sigma_log(np.empty(0), prior_sigma_log=0.08), 4)
    0.0921
    """
    return _TAIL_FACTOR * drawn_sigma_log(residuals, prior_sigma_log=prior_sigma_log)


def drawn_sigma_log(residuals: NDArray[np.float64], *, prior_sigma_log: float) -> float:
    """Return the deviation of ``shrunk_sigma_log`` without widening."""
    number = len(residuals) + PRIOR_WEIGHT
    variance = (np.sum(residuals**2) + PRIOR_WEIGHT * prior_sigma_log**2) / number
    return float(np.sqrt(variance))


_ALIKE, _ALIKE_FRAC = 1e-12, 1e-6
"""Absolute and relative difference below which scores are equal: processors round sums
differently."""
_BITS = 20
"""Bits of the grid: fine enough to change no choice, coarse enough that sums of a few thousand
values have no rounding."""


def first_minimum(scores: Sequence[float] | NDArray[np.float64], *, alike: float = 0.0) -> int:
    """Return the index of the first score that equals the least: order candidates by size.

    Scores are equal within ``alike``, or within a millionth of the least.

    >>> first_minimum([2.0, 1.0 + 1e-9, 1.0]), first_minimum([1.05, 1.0], alike=0.1)
    (1, 0)
    """
    values = np.asarray(scores, dtype=np.float64)
    least = values.min()
    return int(np.argmax(values <= least + max(alike, _ALIKE, _ALIKE_FRAC * abs(float(least)))))


def on_grid(values: ArrayLike) -> NDArray[np.float64]:
    """Round values to multiples of 2**-20, a millionth, so that sums of a few thousand are exact.

    >>> float(on_grid(0.1 + 1e-12) - on_grid(0.1))
    0.0
    """
    return np.round(np.asarray(values, dtype=np.float64) * 2.0**_BITS) / 2.0**_BITS
