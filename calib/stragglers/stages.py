"""Stages of one rank each: the same operators, held against the times of the other stages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import norm

from ..samples.table import SampleTable
from ..workload.operators import OperatorKind

AGAIN_SIGMA_LOG = 0.02
"""How far medians of the same work lie apart when it is measured again on another rank."""
_KEYS = ["kind", "phase", "shape", "element_nbytes"]
_HOST = [OperatorKind.HOST_MICROBATCH.value, OperatorKind.HOST_STEP.value]
_MEDIAN_OVER_MEAN = 1.2533


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCompute:
    """Log of a stage's shared operators over the same on others, and its lower end."""

    log: float
    low_log: float
    sigma_log: float


def stage_compute(table: SampleTable, tail: float) -> dict[int, StageCompute]:
    """Pace of the stages of the newest window, by the operators that they share with others.

    ``tail`` is the chance that the lower end lies above the truth.  The errors of all operators of
    a stage count as one.
    """
    rows = table.operators
    rows = rows[(rows["run_id"] == table.run_id) & ~rows["kind"].isin(_HOST) & ~rows["is_probe"]]
    rows = rows[(rows["window"] == rows["window"].max()) & (rows["time_s"] > 0)]
    shared = rows.groupby(_KEYS)["stage"].transform("nunique") > 1
    rows = rows[shared]
    if rows.empty:
        return {}
    others = pd.Series(0.0, index=rows.index)
    for _, part in rows["time_s"].groupby([rows[key] for key in _KEYS]):
        for place in part.index:
            others[place] = float(part.drop(place).median())
    error = _MEDIAN_OVER_MEAN * rows["spread_log"] / np.sqrt(rows["num_steps"].clip(lower=1))
    each = rows["count"] / rows["num_steps"].clip(lower=1)
    rows = rows.assign(
        own=each * rows["time_s"],
        others=each * others,
        error=each * others * np.hypot(error, AGAIN_SIGMA_LOG),
    )
    # The other side of the comparison is as uncertain.
    strict = float(norm.ppf(1 - tail))
    found = {}
    for stage, part in rows.groupby("stage", sort=True):
        own, usual = float(part["own"].sum()), float(part["others"].sum())
        log, sigma = math.log(own / usual), math.sqrt(2) * float(part["error"].sum()) / usual
        low = log - strict * sigma
        found[int(str(stage))] = StageCompute(log=log, low_log=low, sigma_log=sigma)
    return found
