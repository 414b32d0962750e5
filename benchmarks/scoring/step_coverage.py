"""Whether 90 % intervals of step times hold 90 % of what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import beta

MANY_ROWS = 20
"""Distinct rows from which on the coverage itself is held to limits."""
LOW_FRAC, HIGH_FRAC = 0.85, 0.95
_PROMISED_FRAC = 0.9
_TAIL = 0.05
RowCoverage = Mapping[tuple[str, str], float]
"""By machine and row: share of the draws in which the interval held the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageVerdict:
    """Coverage over distinct rows, and what it was held to."""

    coverage_frac: float
    """Mean over the rows; each counts once, however often it was drawn."""
    num_rows: int
    low_frac: float
    """Of the interval that decides: the limits where rows are many, else the binomial one."""
    high_frac: float
    is_met: bool


def row_coverage(scored: Iterable[pd.DataFrame]) -> RowCoverage:
    """How often the interval of each row held what was measured; rows without one are left out."""
    inside: dict[tuple[str, str], list[bool]] = {}
    for one in scored:
        told = one[np.isfinite(one["low_s"]) & np.isfinite(one["predicted_s"])]
        held = told["measured_s"].between(told["low_s"], told["high_s"])
        for row, is_held in zip(told["row"], held, strict=True):
            inside.setdefault((row.machine, row.row_id), []).append(bool(is_held))
    return {key: float(np.mean(found)) for key, found in inside.items()}


def pooled(parts: Sequence[RowCoverage]) -> RowCoverage:
    """Lines of one table as one: a row counts once, with the mean over the lines it is in."""
    found: dict[tuple[str, str], list[float]] = {}
    for part in parts:
        for key, value in part.items():
            found.setdefault(key, []).append(value)
    return {key: float(np.mean(values)) for key, values in found.items()}


def coverage_verdict(rows: Sequence[float]) -> CoverageVerdict | None:
    """85 to 95 % where there are 20 distinct rows or more, to a tenth of a percent.

    Fewer cannot tell: there the binomial 90 % interval of the coverage (Clopper and Pearson 1934)
    has to hold 90 %.  None where there are no rows.
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


def _binomial_interval(held: float, count: int) -> tuple[float, float]:
    """Of a share, with 5 % on either side; ``held`` need not be whole."""
    low = float(beta.ppf(_TAIL, held, count - held + 1)) if held > 0 else 0.0
    high = float(beta.ppf(1 - _TAIL, held + 1, count - held)) if held < count else 1.0
    return low, high
