"""Who comes last to which collective, and which group's transfers take how long."""

from __future__ import annotations

import numpy as np
import pandas as pd

from .clocks import SYNCHRONISING, aligned_start_s
from .reduce import median_over_steps
from .transfers import EVENT_KEYS

_RANK_ROLE = ["window", "rank", "role"]
_ARRIVAL = [*_RANK_ROLE, "num_events", "num_last", "late_s", "num_steps"]
_LINK = ["window", "collective", "role", "num_ranks", "num_nodes", "nbytes", "ranks"]


def arrival_rows(matched: pd.DataFrame, clocks: pd.DataFrame) -> pd.DataFrame:
    """How late each rank comes to the synchronising collectives of each role, all ranks seen.

    ``num_last`` of its ``num_events`` it was the last at, by more than the clocks' uncertainty;
    ``late_s`` is how much later than the one before it, per step: what the group waited for it
    alone.  Clocks must be known.
    """
    events = matched[matched["collective"].isin(SYNCHRONISING)]
    if events.empty:
        return pd.DataFrame(columns=_ARRIVAL)
    events = events.assign(start_s=aligned_start_s(events, clocks)).dropna(subset=["start_s"])
    groups = events.groupby(EVENT_KEYS, sort=False)
    events = events[groups["rank"].transform("nunique") == events["num_ranks"]]
    if events.empty:
        return pd.DataFrame(columns=_ARRIVAL)
    events = events.merge(_uncertainty(clocks), on=["window", "rank"], how="left")
    events = events.sort_values([*EVENT_KEYS, "start_s"], kind="stable")
    groups = events.groupby(EVENT_KEYS, sort=False)
    ahead_s = events["start_s"] - groups["start_s"].shift(1)
    unsure_s = events["unsure_s"] + groups["unsure_s"].shift(1)
    is_last = groups.cumcount(ascending=False) == 0
    events["is_late"] = is_last & (ahead_s > unsure_s)
    events["late_s"] = np.where(events["is_late"], ahead_s, 0.0) * events.get("stands_for", 1.0)
    num_steps = events.groupby(["window", "rank"])["step"].nunique().rename("num_steps")
    rows = events.groupby(_RANK_ROLE, sort=True).agg(
        num_events=("late_s", "size"), num_last=("is_late", "sum"), late_s=("late_s", "sum")
    )
    rows = rows.reset_index().merge(num_steps.reset_index(), on=["window", "rank"])
    rows["late_s"] /= rows["num_steps"]
    return rows


def link_rows(matched: pd.DataFrame) -> pd.DataFrame:
    """Transfer time of each group by itself, one row per collective and payload.

    ``exposed_s`` is how long its last rank stood still for it, the least over the group; only
    transfers that all ranks of a group recorded, with a known end.
    """
    exact = matched[~matched["is_bound"]]
    stood = np.minimum(exact["exposed_s"], exact["transfer_s"])
    exact = exact.assign(stood_s=stood)
    exact["stood_s"] = exact.groupby(EVENT_KEYS, sort=False)["stood_s"].transform("min")
    events = exact.drop_duplicates(subset=EVENT_KEYS).drop(columns="time_s").assign(rank=0)
    rows = median_over_steps(events.rename(columns={"transfer_s": "time_s"}), _LINK)
    if rows.empty:
        return rows
    stood = events.groupby(_LINK, sort=True)["stood_s"].median().rename("exposed_s")
    return rows.merge(stood.reset_index(), on=_LINK).rename(columns={"collective": "kind"})


def _uncertainty(clocks: pd.DataFrame) -> pd.DataFrame:
    """Half of the interval of each clock; none where it is the reference's own."""
    half = np.where(clocks["is_shared"], 0.0, (clocks["high_s"] - clocks["low_s"]) / 2)
    return clocks[["window", "rank"]].assign(unsure_s=half)
