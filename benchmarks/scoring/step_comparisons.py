"""Paired bootstrap of the errors of two step models on the same rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from forerun.benchmarks.protocols.steps import series_name

NUM_RESAMPLES = 10_000
_SEED = 20261122
_TAIL = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Mean absolute error of ours minus that of another, with its 90 % interval."""

    difference_frac: float
    low_frac: float
    high_frac: float
    num_rows: int
    num_units: int
    """Number of resampled units: series, or rows if all are of one series."""
    are_series: bool

    @property
    def is_better(self) -> bool:
        """True if ours errs less at 95 % confidence: the whole interval is below 0."""
        return self.high_frac < 0


def compare(
    ours: Sequence[pd.DataFrame], theirs: Sequence[pd.DataFrame], *, seed: int = _SEED
) -> Comparison | None:
    """Compare ours with theirs over the same folds; None if both predicted no common row.

    The errors of a row are averaged over its draws first, so that each row counts once.  Rows of a
    series are correlated, so whole series are resampled.
    """
    by_series = _differences(ours, theirs)
    if not by_series:
        return None
    rows = [list(row_differences.values()) for row_differences in by_series.values()]
    are_series = len(rows) > 1
    units = rows if are_series else [[value] for value in rows[0]]
    sums = np.array([sum(unit) for unit in units])
    counts = np.array([len(unit) for unit in units], dtype=np.float64)
    low, high = mean_interval(sums, counts, seed=seed)
    return Comparison(
        difference_frac=float(sums.sum() / counts.sum()),
        low_frac=low,
        high_frac=high,
        num_rows=int(counts.sum()),
        num_units=len(units),
        are_series=are_series,
    )


def mean_interval(
    sums: NDArray[np.float64], counts: NDArray[np.float64], *, seed: int = _SEED
) -> tuple[float, float]:
    """Return the ends of the 90 % interval of a mean, resampling whole units with replacement."""
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), NUM_RESAMPLES)
    low, high = np.quantile((drawn @ sums) / (drawn @ counts), (_TAIL, 1 - _TAIL))
    return float(low), float(high)


def _differences(
    ours: Sequence[pd.DataFrame], theirs: Sequence[pd.DataFrame]
) -> Mapping[str, Mapping[str, float]]:
    """Return the mean difference of absolute errors of each row, by series."""
    by_series: dict[str, dict[str, list[float]]] = {}
    for one, other in zip(ours, theirs, strict=True):
        differences = one["error_frac"].abs() - other["error_frac"].abs()
        for row, also, value in zip(one["row"], other["row"], differences, strict=True):
            if row.row_id != also.row_id:
                raise ValueError(f"row {row.row_id} is compared with {also.row_id}; score one fold")
            if math.isfinite(value):
                by_series.setdefault(series_name(row), {}).setdefault(row.row_id, []).append(value)
    return {
        name: {row: float(np.mean(values)) for row, values in rows.items()}
        for name, rows in by_series.items()
    }
