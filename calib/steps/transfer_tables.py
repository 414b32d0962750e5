"""Times of transfers from published tables of collectives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ..fit.collectives import CollectiveModel, fit_transfers
from ..fit.curves import Samples
from ..fit.groups import Group
from ..fit.networks import NetworkPrior
from ..fit.priors import device_prior
from ..workload.collectives import Collective

_COLUMNS = ("collective", "num_ranks", "num_nodes", "nbytes", "time_s")
_MAX_ROWS = 400
"""Payloads of a group that its curve is drawn through."""


def transfer_tables(
    frames: Sequence[pd.DataFrame],
    *,
    device: str,
    network: NetworkPrior | None = None,
    is_flagged_used: bool = False,
) -> CollectiveModel:
    """Curves through all canonical tables of one device; without rows what its ``network`` says.

    A table of several fabrics (clusters, or versions of the library) counts with the one that has
    most rows.  Flagged rows are left out unless asked for.
    """
    prior = network or device_prior(device).network
    wanted = device_prior(device).name
    samples: dict[Group, Samples] = {}
    for frame in frames:
        rows = frame[frame["device"].map(lambda d: device_prior(str(d)).name == wanted)]
        if not is_flagged_used:
            rows = rows[rows["flag"] == ""]
        if len(rows):
            rows = rows[rows["fabric"] == rows["fabric"].value_counts().idxmax()]
            samples.update(_samples(rows))
    return fit_transfers(samples, prior)


def _samples(rows: pd.DataFrame) -> dict[Group, Samples]:
    out = {}
    for (kind, ranks, nodes), found in rows.groupby(["collective", "num_ranks", "num_nodes"]):
        if kind == Collective.OTHER.value:
            continue
        group = Group(collective=Collective(kind), num_ranks=int(ranks), num_nodes=int(nodes))
        medians = found.groupby("nbytes")["time_s"].median().sort_index()
        step = max(1, len(medians) // _MAX_ROWS)
        kept = medians.iloc[::step]
        out[group] = Samples(
            nbytes=kept.index.to_numpy(dtype=np.float64),
            time_s=kept.to_numpy(dtype=np.float64),
            weight=np.ones(len(kept)),
        )
    return out
