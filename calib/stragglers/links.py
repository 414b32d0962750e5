"""Groups whose transfers take longer than the same transfers of the other groups of their role."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.stats import norm

from ..samples.reduce import median_error_log, median_of_others
from ..samples.table import SampleTable
from .straggler import Straggler, StragglerKind

LEAST_SLOWER_FRAC = 0.1
"""Share of a transfer by which links of one kind may differ without a fault."""
_KEYS = ["kind", "role", "num_ranks", "num_nodes", "nbytes"]


def link_stragglers(table: SampleTable, *, least_s: float, false_alarm: float) -> list[Straggler]:
    """Groups of the newest window with an exposed excess of at least ``least_s`` per step.

    Their excess is beyond the others' transfers, their cost as much of it as is exposed.
    """
    rows = table.links[table.links["run_id"] == table.run_id]
    rows = rows[(rows["window"] == rows["window"].max()) & (rows["num_steps"] > 1)]
    rows = rows[rows.groupby(_KEYS)["ranks"].transform("nunique") > 1]
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
    strict = float(norm.ppf(1 - false_alarm / len(sums)))
    usual = float(norm.ppf(0.95))
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
                    low_s=row["cost_s"] - usual * row["error_s"],
                    high_s=row["cost_s"] + usual * row["error_s"],
                )
            )
    return found


def _beyond(rows: pd.DataFrame, column: str) -> pd.Series:
    """Each group's value less the median of the other groups with the same transfer."""
    return rows[column] - median_of_others(rows, column, _KEYS)
