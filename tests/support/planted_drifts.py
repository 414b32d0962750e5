"""Two windows of one run, drawn with the noise of real ranks and links, and one planted change."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from planted_stragglers import recorded, table_of

from forerun.calib.samples.table import SampleTable
from forerun.calib.workload.config import Parallelism

TRANSFER_S = 0.06
NUM_TRANSFERS = 8
NUM_STEPS = 10
REPEAT_SIGMA_LOG = 0.01
"""Deviation of the whole level from one window to the next, common to all ranks."""


def groups_of(layout: Parallelism) -> dict[tuple[str, str], None]:
    """Return TP and DP groups as (role, ranks), with ranks in the table's form."""
    tp, ranks = layout.tp, range(layout.num_ranks)
    result: dict[tuple[str, str], None] = {}
    for rank in ranks:
        if tp > 1:
            first = rank - rank % tp
            result["tp", ",".join(str(r) for r in range(first, first + tp))] = None
        if layout.dp > 1:
            result["dp", ",".join(str(r) for r in ranks if r % tp == rank % tp)] = None
    return result


def group_transfers(
    layout: Parallelism,
    draw: np.random.Generator,
    *,
    sigma_log: float,
    slower: Mapping[tuple[str, str], float] | None = None,
) -> pd.DataFrame:
    """Return transfers of each group: medians over steps of log-normal times."""
    rows = []
    for role, ranks in groups_of(layout):
        logs = sigma_log * draw.standard_normal(NUM_STEPS)
        center = float(np.median(logs))
        spread = 1.4826 * float(np.median(np.abs(logs - center)))
        factor = np.exp(center) * (1 + (slower or {}).get((role, ranks), 0.0))
        rows.append(
            {
                "kind": "all_reduce", "role": role, "ranks": ranks, "nbytes": 1 << 24,
                "num_ranks": ranks.count(",") + 1, "num_nodes": 1,
                "time_s": TRANSFER_S * factor / NUM_TRANSFERS, "num_steps": NUM_STEPS,
                "exposed_s": TRANSFER_S * factor / NUM_TRANSFERS, "spread_log": spread,
                "count": NUM_STEPS * NUM_TRANSFERS,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def window(
    layout: Parallelism,
    draw: np.random.Generator,
    *,
    sigma_log: float,
    slower: Mapping[int, float] | None = None,
    part: str = "compute",
    slower_groups: Mapping[tuple[str, str], float] | None = None,
    number: int = 0,
) -> SampleTable:
    """Return one window; ``slower`` is that of ``recorded``, ``slower_groups`` of
    ``group_transfers``."""
    settings = {"sigma_log": sigma_log, "slower": slower, "part": part}
    base = recorded(layout, draw, **settings)  # type: ignore[arg-type]
    level = float(np.exp(REPEAT_SIGMA_LOG * draw.standard_normal()))
    phases = base.phases.assign(window=number)
    phases[["time_s", "wait_s"]] *= level
    moved = group_transfers(layout, draw, sigma_log=sigma_log, slower=slower_groups)
    return table_of(
        layout,
        phases=phases,
        steps=base.steps.assign(window=number),
        samples=base.samples.assign(window=number),
        links=moved.assign(window=number),
    )
