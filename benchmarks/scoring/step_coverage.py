"""Coverage of 90 % intervals of step times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import beta

MANY_ROWS = 20
"""Distinct rows from which on the coverage itself has limits."""
LOW_FRAC, HIGH_FRAC = 0.85, 0.95
_PROMISED_FRAC = 0.9
_TAIL = 0.05
RowCoverage = Mapping[tuple[str, str], float]
"""Share of draws in which the interval contained the measured step, by machine and row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageVerdict:
    """Coverage over distinct rows, and its limits."""

    coverage_frac: float
    """Mean over the rows; each counts once, regardless of how often it was drawn."""
    num_rows: int
    low_frac: float
    """Low end of the deciding interval: the limits if there are many rows, else the binomial
    one."""
    high_frac: float
    is_met: bool


def row_coverage(scored: Iterable[pd.DataFrame]) -> RowCoverage:
    """Return the share of draws in which each row's interval held; rows without one are skipped."""
    inside: dict[tuple[str, str], list[bool]] = {}
    for one in scored:
        bounded = one[np.isfinite(one["low_s"]) & np.isfinite(one["predicted_s"])]
        is_inside = bounded["measured_s"].between(bounded["low_s"], bounded["high_s"])
        for row, is_row_inside in zip(bounded["row"], is_inside, strict=True):
            inside.setdefault((row.machine, row.row_id), []).append(bool(is_row_inside))
    return {key: float(np.mean(outcomes)) for key, outcomes in inside.items()}


def pooled(parts: Sequence[RowCoverage]) -> RowCoverage:
    """Return lines of one table as one: a row counts once, with the mean over its lines."""
    grouped: dict[tuple[str, str], list[float]] = {}
    for part in parts:
        for key, value in part.items():
            grouped.setdefault(key, []).append(value)
    return {key: float(np.mean(values)) for key, values in grouped.items()}


def coverage_verdict(rows: Sequence[float]) -> CoverageVerdict | None:
    """Require 85 to 95 % if there are 20 distinct rows or more, to a tenth of a percent.

    Fewer rows are inconclusive: then the binomial 90 % interval of the coverage (Clopper and
    Pearson 1934) has to contain 90 %.  None if there are no rows.
    """
    count = len(rows)
    if not count:
        return None
    coverage = float(np.mean(rows))
    if count >= MANY_ROWS:
        low, high = LOW_FRAC, HIGH_FRAC
        is_met = low <= round(coverage, 3) <= high
    else:
        low, high = _binomial_interval(coverage * count, count)
        is_met = low <= _PROMISED_FRAC <= high
    return CoverageVerdict(
        coverage_frac=coverage, num_rows=count, low_frac=low, high_frac=high, is_met=is_met
    )


def _binomial_interval(num_covered: float, count: int) -> tuple[float, float]:
    """Return the interval of a share, 5 % on either side; ``num_covered`` may be a fraction."""
    low = float(beta.ppf(_TAIL, num_covered, count - num_covered + 1)) if num_covered > 0 else 0.0
    high = (
        float(beta.ppf(1 - _TAIL, num_covered + 1, count - num_covered))
        if num_covered < count
        else 1.0
    )
    return low, high
