"""Stages of one rank each: the same operators, held against the times of the other stages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm

from ..samples.reduce import median_error_log, median_of_others
from ..samples.table import SampleTable
from ..workload.operators import OperatorKind

AGAIN_SIGMA_LOG = 0.02
"""How far medians of the same work lie apart when it is measured again on another rank."""
_KEYS = ["kind", "phase", "shape", "element_nbytes"]
_HOST = [OperatorKind.HOST_MICROBATCH.value, OperatorKind.HOST_STEP.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCompute:
    """Log of a stage's shared operators over the same on others, and its lower end."""

    log: float
    low_log: float
    sigma_log: float


def stage_compute(table: SampleTable, tail: float) -> dict[int, StageCompute]:
    """How slow each stage of the newest window is, by the operators that it shares with others.

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
    others = median_of_others(rows, "time_s", _KEYS)
    error = median_error_log(rows)
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
