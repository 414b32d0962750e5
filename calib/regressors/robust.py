"""Fits, deviations and choices that neither a few wild samples nor rounding decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

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


PRIOR_WEIGHT = 5.0
"""Residuals that the prior counts for: with it 90 % intervals covered 91 % on public step times."""
UNMEASURED_SIGMA_LOG = 0.5
"""Error of an operator whose kind was never measured."""
Z_90 = 1.6448536269514722
"""The normal distribution's 95 % quantile."""
STUDENT_90 = 1.8945786051
"""Student's with 7 degrees: half of a 90 % interval over the model's own deviation."""
_TAIL_FACTOR = STUDENT_90 / Z_90
"""Widens a normal 90 % interval to that of Student's t with 7 degrees."""


def shrunk_sigma_log(residuals: NDArray[np.float64], *, prior_sigma_log: float) -> float:
    """Deviation of left-out residuals of log time, drawn to the prior where they are few.

    Widened so that a normal 90 % interval is Student's with 7 degrees.

    >>> round(shrunk_sigma_log(np.empty(0), prior_sigma_log=0.08), 4)
    0.0921
    """
    return _TAIL_FACTOR * drawn_sigma_log(residuals, prior_sigma_log=prior_sigma_log)


def drawn_sigma_log(residuals: NDArray[np.float64], *, prior_sigma_log: float) -> float:
    """The same deviation as it is, not widened."""
    number = len(residuals) + PRIOR_WEIGHT
    variance = (np.sum(residuals**2) + PRIOR_WEIGHT * prior_sigma_log**2) / number
    return float(np.sqrt(variance))


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
