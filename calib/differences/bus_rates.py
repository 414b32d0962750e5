"""Bus bandwidths of a run's groups beside published ones of the same kind."""

from __future__ import annotations

import pandas as pd

from ..fit.priors import device_prior
from ..network.groups import bus_factor
from ..samples.table import SampleTable
from ..units import MIB
from ..workload.collectives import Collective

_LARGE_NBYTES = 64 * MIB
"""Payloads from which on latency no longer counts."""
_KEY = ["collective", "num_ranks", "num_nodes"]


def bus_rates(table: SampleTable, published: pd.DataFrame) -> pd.DataFrame:
    """The rows of ``published`` that are of the kind of a group of the newest run, and in
    ``bytes_per_s`` its best rate at large payloads."""
    rows = table.collectives.rename(columns={"kind": "collective"})
    is_told = (rows["run_id"] == table.run_id) & ~rows["is_bound"] & (rows["time_s"] > 0)
    rows = rows[is_told & (rows["nbytes"] >= _LARGE_NBYTES)]
    names = zip(rows["collective"], rows["num_ranks"], strict=True)
    factors = [bus_factor(Collective(name), ranks) for name, ranks in names]
    rows = rows.assign(bytes_per_s=factors * rows["nbytes"] / rows["time_s"])
    best = rows.groupby(_KEY, as_index=False)["bytes_per_s"].max()
    device = device_prior(str(table.newest("runs")["device"].iloc[0])).name
    return best.merge(published[published["device"] == device], on=_KEY)
