"""How far the run's own work lies from its probes, and how sure that is of other shapes.

A probe on an accelerator runs kernels of ours: not those of the model, whose products may hold a
norm and whose attention is another library's.  A control is a shape that both have timed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .reduce import median_error_log, spread_of_error

_MOST_RATIO = 4.0
"""Beyond this a control has met something else, and corrects nothing."""
_PRIOR_LOG = math.log(_MOST_RATIO) / 3.0
"""Deviation before any control is known: what is refused lies three of them away."""
_PRIOR_WEIGHT = 1.0
"""The prior counts for one control."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """Log of the run's time over the probe's: by key, and how far that differs."""

    log_ratios: Mapping[Hashable, float]
    """Median over the controls of a key."""
    numbers: Mapping[Hashable, int]
    of_keys_log: float
    """Deviation of a key's ratio from 1."""
    of_shapes_log: float
    """Deviation of a shape's ratio from its key's."""

    def corrected(
        self, rows: pd.DataFrame, keys: list[str], corrected_s: pd.Series, bare_s: pd.Series
    ) -> pd.DataFrame:
        """The rows with their times in the run, ``corrected_s`` by the ratio where there is one and
        ``bare_s`` elsewhere, and with the error of that in ``spread_log``."""
        names = list(rows[keys].itertuples(index=False, name=None))
        logs = np.array([self.log_ratios.get(name, np.nan) for name in names])
        number = np.array([self.numbers.get(name, 0) for name in names])
        width = np.where(
            number > 0,
            # A shape about its key, whose own place so many controls tell.
            self.of_shapes_log * np.sqrt(1.0 + 1.0 / np.maximum(number, 1)),
            self.of_keys_log,
        )
        times = np.where(number > 0, corrected_s * np.exp(np.nan_to_num(logs)), bare_s)
        error_log = np.hypot(median_error_log(rows), width)
        return rows.assign(time_s=times, spread_log=spread_of_error(rows, error_log))


def controls_of(pairs: pd.DataFrame, keys: list[str]) -> Controls:
    """The controls of pairs of ``live_s`` and ``control_s``, one row for each shape.

    Shapes of a key are taken to differ as much as keys do until several controls of keys say how
    much it is.  What repeats differ by is not in it.
    """
    known = pairs.assign(log=np.log(pairs["live_s"] / pairs["control_s"]))
    known = known[known["log"].abs() <= math.log(_MOST_RATIO)]
    groups = known.groupby(keys, sort=True)["log"]
    centers = groups.median()
    numbers = groups.size()
    of_keys = _deviation(centers.to_numpy(dtype=np.float64), _PRIOR_LOG, len(centers))
    within = (known["log"] - groups.transform("mean")).to_numpy(dtype=np.float64)
    of_shapes = _deviation(within, of_keys, int((numbers - 1).sum()))
    names = [name if isinstance(name, tuple) else (name,) for name in centers.index]
    return Controls(
        log_ratios=dict(zip(names, centers.tolist(), strict=True)),
        numbers=dict(zip(names, numbers.tolist(), strict=True)),
        of_keys_log=of_keys,
        of_shapes_log=of_shapes,
    )


def _deviation(values: NDArray[np.float64], prior: float, freedom: int) -> float:
    """Root of the mean square about 0 with so many degrees of freedom, drawn to the prior."""
    square = float(np.sum(values**2)) + _PRIOR_WEIGHT * prior**2
    return math.sqrt(square / (freedom + _PRIOR_WEIGHT))
