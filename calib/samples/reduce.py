"""Reduction of events to one time per key, robust against single slow steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd  # regressors only need the constants, and it is slow to import

MAD_TO_SIGMA = 1.4826
"""Factor from a median absolute deviation to the standard deviation of a normal distribution."""
MEDIAN_OVER_MEAN = 1.2533
"""Standard error of a median over that of a mean, of normal values: sqrt(pi / 2)."""
MAD_EFFICIENCY = 0.37
"""Efficiency of the median deviation on normal data: this share of its values counts as degrees of
freedom."""
# Logarithms need positive times; this is one tick of the recording clocks.
_LEAST_TIME_S = 1e-9


def mad_sigma(values: NDArray[np.float64]) -> float:
    """Return the standard deviation of the values from their median deviation, which is robust to
    outliers."""
    return MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))


def median_error_log(rows: pd.DataFrame) -> pd.Series:
    """Return the standard error of the logarithm of each row's ``time_s``, from the spread over its
    steps."""
    return MEDIAN_OVER_MEAN * rows["spread_log"] / np.sqrt(rows["num_steps"].clip(lower=1))


def spread_of_error(rows: pd.DataFrame, error_log: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ``spread_log`` that yields such a standard error."""
    num_steps = rows["num_steps"].clip(lower=1).to_numpy(dtype=np.float64)
    return error_log / MEDIAN_OVER_MEAN * np.sqrt(num_steps)


def median_of_others(rows: pd.DataFrame, column: str, keys: list[str]) -> pd.Series:
    """Return, for each row, the median of the column over the other rows with the same keys."""

    def others(values: pd.Series) -> NDArray[np.float64]:
        known = values.to_numpy(dtype=np.float64)
        return np.array([np.median(np.delete(known, place)) for place in range(len(known))])

    return rows.groupby(keys)[column].transform(others)


def median_over_steps(
    events: pd.DataFrame, keys: list[str], *, is_weighted: bool = False
) -> pd.DataFrame:
    """Return ``time_s``, ``count``, ``num_steps``, ``num_seen`` and ``spread_log`` per key.

    ``events`` has ``rank``, ``step`` and ``time_s`` besides the keys, and with ``is_weighted`` the
    number that each ``stands_for``. The mean is taken within a step, which includes the sum, then
    the median over the steps of a rank, and the median over ranks.
    """
    # Sums of floats depend on their order: after sorting, the same events give the same digits.
    events = events.sort_values([*keys, "rank", "step", "time_s"], kind="stable")
    weight = events["stands_for"] if is_weighted else 1.0
    events = events.assign(sum=events["time_s"] * weight, size=weight)
    steps = events.groupby([*keys, "rank", "step"], sort=True)[["sum", "size"]].sum().reset_index()
    steps["mean"] = (steps["sum"] / steps["size"]).clip(lower=_LEAST_TIME_S)
    ranks = steps.groupby([*keys, "rank"], sort=True)["mean"].median().reset_index()
    steps["log"] = np.log(steps["mean"])
    center = steps.groupby([*keys, "rank"], sort=True)["log"].transform("median")
    steps["deviation"] = (steps["log"] - center).abs()
    groups = steps.groupby(keys, sort=True)
    out = ranks.groupby(keys, sort=True)["mean"].median().rename("time_s").to_frame()
    out["count"] = groups["size"].sum().round().astype("int64")
    out["num_steps"] = groups["step"].nunique()
    out["num_seen"] = groups["rank"].nunique()
    out["spread_log"] = groups["deviation"].median() * MAD_TO_SIGMA
    return out.reset_index()
