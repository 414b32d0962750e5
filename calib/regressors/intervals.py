"""How wrong an estimate may be, from residuals of samples that were left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PRIOR_WEIGHT = 5.0
"""Residuals that the prior counts for: with it 90 % intervals covered 91 % on public step times."""
UNMEASURED_SIGMA_LOG = 0.5
"""Error of an operator whose kind was never measured."""
Z_90 = 1.6448536269514722
"""The normal distribution's 95 % quantile."""
_STUDENT_90 = 1.8945786051
"""Student's with 7 degrees."""
_LEVEL = 0.9
"""All intervals are of 90 %."""
_QUANTILE_PRIOR = 20.0
"""Residuals that the quantile of all groups counts for."""
_LEAST_QUANTILE = 0.5
"""An interval is at least half as wide as the model's own account: few lucky residuals do not
narrow it further. Bound nowhere on public tables (benchmarks/sensitivity.py)."""
_TAIL_FACTOR = _STUDENT_90 / Z_90
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """How many of the model's own deviations hold 90 % of left-out residuals, by group."""

    by_group: Mapping[str, float]
    pooled: float

    def half_width(self, group: str, sigma_log: NDArray[np.float64]) -> NDArray[np.float64]:
        """Half of the 90 % interval in log time, ``(rows,)``."""
        return self.by_group.get(group, self.pooled) * sigma_log


def fit_quantiles(scaled: Mapping[str, NDArray[np.float64]]) -> Quantiles:
    """Quantiles of left-out residuals over their deviations (split conformal, pooled).

    A group's quantile is drawn to that of all groups together, and that to Student's t.

    >>> round(fit_quantiles({}).pooled, 3)
    1.895
    """
    start = _STUDENT_90
    every = np.abs(np.concatenate([np.empty(0), *[scaled[name] for name in sorted(scaled)]]))
    pooled = _drawn(every, start)
    return Quantiles(
        by_group={name: _drawn(np.abs(values), pooled) for name, values in scaled.items()},
        pooled=pooled,
    )


def _drawn(sizes: NDArray[np.float64], prior: float) -> float:
    """The 90 % quantile, drawn to the prior in log by as much as few values deserve."""
    number = len(sizes)
    if not number:
        return prior
    level = min(_LEVEL * (number + 1) / number, 1.0)
    own = max(float(np.quantile(sizes, level)), _LEAST_QUANTILE)
    trust = number / (number + _QUANTILE_PRIOR)
    return float(np.exp(trust * np.log(own) + (1 - trust) * np.log(prior)))
