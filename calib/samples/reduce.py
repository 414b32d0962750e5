"""From events to one time per key, robust against single slow steps."""

from __future__ import annotations

import numpy as np
import pandas as pd

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation of a normal distribution."""
_LEAST_TIME_S = 1e-9


def median_over_steps(events: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """``time_s``, ``count``, ``num_steps``, ``num_seen`` and ``spread_log`` per key.

    ``events`` has ``rank``, ``step`` and ``time_s`` besides the keys.  Within a step the mean is
    taken, since a step pays for the sum; over the steps of a rank the median, and over ranks the
    median again.
    """
    events = events.sort_values([*keys, "rank", "step", "time_s"], kind="stable")
    by_step = events.groupby([*keys, "rank", "step"], sort=True)["time_s"]
    steps = by_step.agg(["mean", "size"]).reset_index()
    steps["mean"] = steps["mean"].clip(lower=_LEAST_TIME_S)
    ranks = steps.groupby([*keys, "rank"], sort=True)["mean"].median().reset_index()
    steps["log"] = np.log(steps["mean"])
    center = steps.groupby([*keys, "rank"], sort=True)["log"].transform("median")
    steps["deviation"] = (steps["log"] - center).abs()
    groups = steps.groupby(keys, sort=True)
    out = ranks.groupby(keys, sort=True)["mean"].median().rename("time_s").to_frame()
    out["count"] = groups["size"].sum()
    out["num_steps"] = groups["step"].nunique()
    out["num_seen"] = groups["rank"].nunique()
    out["spread_log"] = groups["deviation"].median() * MAD_TO_SIGMA
    return out.reset_index()
