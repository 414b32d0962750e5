"""Steps of a run, one row each, with their predictions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ...calib.forecast.forecast_record import Forecast
from ...calib.samples.table import SampleTable

COLUMNS = {
    "iteration": "int64",
    "window": "int64",
    "unix_s": "float64",
    "time": "datetime64[ns, UTC]",
    "step_time_s": "float64",
    "predicted_s": "float64",
    "low_s": "float64",
    "high_s": "float64",
    "is_hooked": "bool",
    "is_clean": "bool",
    "is_disturbed": "bool",
    "flags": "object",
}
"""Columns of ``run.steps`` and their types; described in ``docs/python.md``."""


def step_frame(
    table: SampleTable, made: Sequence[Forecast], seen: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Return the steps of the newest run in order: those that its companion logged, and recorded
    ones that it did not, with the newest forecast in ``made`` before each."""
    steps = table.newest("steps")
    by_step = steps.groupby(["window", "step"], sort=True)
    step_rows = by_step.agg(
        step_time_s=("time_s", "median"),
        is_hooked=("is_hooked", "max"),
        is_clean=("is_clean", "min"),
        flags=("flags", _joined),
    ).reset_index()
    step_rows["iteration"] = step_rows.pop("step") + 1
    recorded = _sorted(_typed(predicted_before(step_rows, made)))
    if seen is None:
        return recorded
    whole = _typed(seen.assign(is_clean=seen["flags"].eq("")))
    others = recorded[~recorded["iteration"].isin(whole["iteration"])]
    return _sorted(pd.concat([whole, others])) if len(others) else _sorted(whole)


def predicted_before(steps: pd.DataFrame, made: Sequence[Forecast]) -> pd.DataFrame:
    """Add the next-step prediction of the newest forecast before each step; NaN before the
    first."""
    known = sorted(made, key=lambda one: (one.steps_done, one.now_unix_s))
    places = np.searchsorted([one.steps_done for one in known], steps["iteration"], side="left") - 1
    for column, name in (
        ("predicted_s", "step_time_s"),
        ("low_s", "single_low_s"),
        ("high_s", "single_high_s"),
    ):
        forecast_values = np.array([getattr(one, name) for one in known] + [np.nan])
        # Index -1, before the first forecast, selects the NaN at the end.
        steps[column] = forecast_values[places]
    return steps


def _typed(steps: pd.DataFrame) -> pd.DataFrame:
    """Add missing columns; unknown values are NaN, NaT or False."""
    frame = steps.copy()
    for column, value in (("unix_s", np.nan), ("is_disturbed", False)):
        if column not in frame:
            frame[column] = value
    frame["time"] = pd.to_datetime(frame["unix_s"], unit="s", utc=True)
    return frame.astype(COLUMNS)[list(COLUMNS)]


def _sorted(steps: pd.DataFrame) -> pd.DataFrame:
    return steps.sort_values("iteration", kind="stable").reset_index(drop=True)


def _joined(flags: pd.Series) -> str:
    """Return the union of all ranks' flags, separated by commas."""
    return ",".join(sorted({word for text in flags for word in text.split(",") if word}))
