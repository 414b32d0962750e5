"""Scores of predictions: error, bias, coverage of the 90 % interval and its width.

Scored rows are a frame with ``protocol``, ``group``, what was measured and predicted, and the ends
of the 90 % interval (``TIMES``), all seeds together.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

ALL_GROUPS = "all"
TIMES = ("measured_s", "predicted_s", "low_s", "high_s")
FIGURES = (
    "mape_frac",
    "median_ape_frac",
    "p90_ape_frac",
    "bias_frac",
    "coverage_90_frac",
    "interval_width_frac",
)


def figures(rows: pd.DataFrame) -> dict[str, float]:
    """The six figures of scored rows; errors are ``(predicted - measured) / measured``, the width
    is half the interval over the prediction.

    >>> row = {"measured_s": [1.0], "predicted_s": [1.1], "low_s": [0.9], "high_s": [1.3]}
    >>> figures(pd.DataFrame(row))["bias_frac"]  # doctest: +ELLIPSIS
    0.1...
    """
    measured, predicted, low, high = (_times(rows, name) for name in TIMES)
    error = (predicted - measured) / measured
    is_inside = (low <= measured) & (measured <= high)
    values = (
        np.mean(np.abs(error)),
        np.median(np.abs(error)),
        np.quantile(np.abs(error), 0.9),
        np.mean(error),
        np.mean(is_inside),
        np.mean((high - low) / 2 / predicted),
    )
    return {name: float(value) for name, value in zip(FIGURES, values, strict=True)}


def score_rows(rows: pd.DataFrame, table: str) -> list[dict[str, object]]:
    """One JSON row per protocol and group of scored rows, before them one with the group ``all``.

    ``all`` weighs every group equally: each figure is the mean over the groups, ``n`` their sum.
    """
    found: list[dict[str, object]] = []
    for protocol, members in rows.groupby("protocol", sort=False):
        parts = {str(group): part for group, part in members.groupby("group", sort=False)}
        each = {group: figures(part) for group, part in parts.items()}
        mean = {name: np.mean([one[name] for one in each.values()]) for name in FIGURES}
        for group, one in {ALL_GROUPS: mean, **each}.items():
            labels = {"table": table, "protocol": protocol, "group": group}
            rounded = {name: round(float(value), 6) for name, value in one.items()}
            found.append({**labels, "n": len(parts.get(group, members)), **rounded})
    return found


def joined(parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Scored rows below each other; none where there are no parts."""
    found = list(parts)
    if not found:
        return pd.DataFrame(columns=["protocol", "group", *TIMES])
    return pd.concat(found, ignore_index=True)


def noise_floors(frame: pd.DataFrame) -> pd.DataFrame:
    """How far repeats of one shape lie from their median: no predictor can do better.

    ``mean_frac`` and ``median_frac`` of ``|t - median of its shape| / median`` over the rows of
    repeated shapes, by group of a canonical operator table; none for a group without any.
    """
    frame = frame[frame["flag"] == ""]
    name = frame["group"] + "/" + frame["phase"]
    keys = [name, frame["device"], frame["shape"], frame["element_nbytes"]]
    grouped = frame["time_s"].groupby(keys)
    median, count = grouped.transform("median"), grouped.transform("size")
    spread = ((frame["time_s"] - median).abs() / median)[count > 1]
    by_name = spread.groupby(name, sort=False)
    return pd.DataFrame({"mean_frac": by_name.mean(), "median_frac": by_name.median()})


def _times(rows: pd.DataFrame, name: str) -> NDArray[np.float64]:
    return rows[name].to_numpy(dtype=np.float64)
