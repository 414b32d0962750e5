"""Transfer times of collectives, and the waiting for late ranks, from what each rank saw."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..workload.collectives import Collective
from .reduce import median_over_steps

_EVENT = ["window", "step", "collective", "group", "ranks", "source", "target", "sequence"]
_KEYS = ["window", "collective", "role", "num_ranks", "span", "nbytes"]


def match_ranks(events: pd.DataFrame) -> pd.DataFrame:
    """Each record with its transfer's time: the minimum over the ranks of the group.

    The last rank to arrive waits least, so its duration is the transfer.  ``wait_s`` is how much
    longer a rank stood still.  ``is_bound`` marks transfers known from above only: no rank has an
    exact end, or a rank of the group is missing.
    """
    events = _with_ends(events)
    groups = events.groupby(_EVENT, sort=False)
    events["transfer_s"] = groups["time_s"].transform("min")
    events["nbytes"] = groups["nbytes"].transform("max")
    is_exact = (~events["is_bound"]).groupby([events[c] for c in _EVENT], sort=False)
    seen = groups["rank"].transform("nunique")
    events["is_bound"] = ~is_exact.transform("any") | (seen < events["num_ranks"])
    stood = np.minimum(events["exposed_s"], events["time_s"])
    events["wait_s"] = np.maximum(stood - events["transfer_s"], 0.0)
    return events


def collective_rows(matched: pd.DataFrame) -> pd.DataFrame:
    """One row per window, collective, role, size, span and payload; exact ends win over bounds."""
    seen = matched.groupby(_KEYS, sort=True)["rank"].nunique().rename("num_seen")
    events = matched.drop_duplicates(subset=_EVENT).drop(columns="time_s")
    events = events.rename(columns={"transfer_s": "time_s"})
    events["rank"] = 0
    all_bound = events.groupby(_KEYS, sort=False)["is_bound"].transform("all")
    rows = median_over_steps(events[~events["is_bound"] | all_bound], [*_KEYS, "is_bound"])
    rows = rows.drop(columns="num_seen").merge(seen.reset_index(), on=_KEYS)
    return rows.rename(columns={"collective": "kind"})


def skew_rows(matched: pd.DataFrame) -> pd.DataFrame:
    """Mean waiting per step of each rank, by role and collective, in seconds."""
    keys = ["window", "rank", "role", "collective"]
    matched = matched.sort_values([*keys, "step", "wait_s"], kind="stable")
    num_steps = matched.groupby(["window", "rank"])["step"].nunique().rename("num_steps")
    rows = matched.groupby(keys, sort=True)["wait_s"].sum().reset_index()
    rows = rows.merge(num_steps.reset_index(), on=["window", "rank"])
    rows["wait_s"] /= rows["num_steps"]
    return rows


def _with_ends(events: pd.DataFrame) -> pd.DataFrame:
    """Group size and span; both ends of a send become one transfer between source and target."""
    is_send = events["collective"] == Collective.SEND.value
    is_recv = events["collective"] == Collective.RECV.value
    is_pair = is_send | is_recv
    source = events["rank"].where(is_send, events["peer"]).where(is_pair, -1)
    target = events["peer"].where(is_send, events["rank"]).where(is_pair, -1)
    sizes = events["ranks"].map(_size)
    spans = events["ranks"].map(_span)
    return events.assign(
        collective=events["collective"].where(~is_recv, Collective.SEND.value),
        source=source,
        target=target,
        num_ranks=sizes.where(~is_pair, 2),
        span=spans.where(~is_pair, (source - target).abs() + 1),
    )


def _size(ranks: str) -> int:
    return ranks.count(",") + 1


def _span(ranks: str) -> int:
    members = [int(rank) for rank in ranks.split(",")]
    return max(members) - min(members) + 1
