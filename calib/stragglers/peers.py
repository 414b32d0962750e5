"""The same work of two or more, held against each other: transfers of the groups of a role, and
operators of stages that have one rank each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import ndtri

from ..regressors.intervals import Z_90
from ..samples.reduce import median_error_log, median_of_others
from ..samples.table import SampleTable
from ..workload.operators import OperatorKind
from .straggler import Straggler, StragglerKind

LEAST_SLOWER_FRAC = 0.1
"""Share of a transfer by which links of one kind may differ without a fault."""
AGAIN_SIGMA_LOG = 0.02
"""How far medians of the same work lie apart when it is measured again on another rank."""
_TRANSFER = ["kind", "role", "num_ranks", "num_nodes", "nbytes"]
_OPERATOR = ["kind", "phase", "shape", "element_nbytes"]
_HOST = [OperatorKind.HOST_MICROBATCH.value, OperatorKind.HOST_STEP.value]


def link_stragglers(table: SampleTable, *, least_s: float, false_alarm: float) -> list[Straggler]:
    """Groups of the newest window with an exposed excess of at least ``least_s`` per step.

    Their excess is beyond the others' transfers, their cost as much of it as is exposed.
    """
    rows = table.newest("links")
    rows = rows[(rows["window"] == rows["window"].max()) & (rows["num_steps"] > 1)]
    rows = rows[rows.groupby(_TRANSFER)["ranks"].transform("nunique") > 1]
    if rows.empty:
        return []
    each = rows["count"] / rows["num_steps"]
    rows = rows.assign(
        whole_s=rows["time_s"] * each,
        excess_s=_beyond(rows, "time_s") * each,
        cost_s=_beyond(rows, "exposed_s") * each,
        # The others' median is as uncertain as the one that is held against it.
        error_s=np.sqrt(2) * median_error_log(rows) * rows["time_s"] * each,
    )
    sums = rows.groupby(["role", "ranks"], sort=True)[
        ["whole_s", "excess_s", "cost_s", "error_s"]
    ].sum()
    # Bonferroni over all groups that are compared.
    strict = float(ndtri(1 - false_alarm / len(sums)))
    found = []
    for (role, ranks), row in zip(sums.index.tolist(), sums.to_dict("records"), strict=True):
        usual_s = row["whole_s"] - row["excess_s"]
        is_slow = row["excess_s"] > max(strict * row["error_s"], LEAST_SLOWER_FRAC * usual_s)
        if is_slow and row["cost_s"] >= least_s:
            found.append(
                Straggler(
                    kind=StragglerKind.LINK,
                    stage=-1,
                    role=role,
                    ranks=tuple(int(rank) for rank in ranks.split(",")),
                    excess_s=row["excess_s"],
                    cost_s=row["cost_s"],
                    low_s=row["cost_s"] - Z_90 * row["error_s"],
                    high_s=row["cost_s"] + Z_90 * row["error_s"],
                )
            )
    return found


def _beyond(rows: pd.DataFrame, column: str) -> pd.Series:
    """Each group's value less the median of the other groups with the same transfer."""
    return rows[column] - median_of_others(rows, column, _TRANSFER)


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
    shared = rows.groupby(_OPERATOR)["stage"].transform("nunique") > 1
    rows = rows[shared]
    if rows.empty:
        return {}
    others = median_of_others(rows, "time_s", _OPERATOR)
    error = median_error_log(rows)
    each = rows["count"] / rows["num_steps"].clip(lower=1)
    rows = rows.assign(
        own=each * rows["time_s"],
        others=each * others,
        error=each * others * np.hypot(error, AGAIN_SIGMA_LOG),
    )
    # The other side of the comparison is as uncertain.
    strict = float(ndtri(1 - tail))
    found = {}
    for stage, part in rows.groupby("stage", sort=True):
        own, Z_90 = float(part["own"].sum()), float(part["others"].sum())
        log, sigma = math.log(own / Z_90), math.sqrt(2) * float(part["error"].sum()) / Z_90
        low = log - strict * sigma
        found[int(str(stage))] = StageCompute(log=log, low_log=low, sigma_log=sigma)
    return found
