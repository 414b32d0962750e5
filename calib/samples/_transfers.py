"""Transfer times of collectives, and the waiting for late ranks, from the records of each rank."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..units import NS_PER_S
from ..workload.collectives import Collective, GroupRole
from ..workload.parallelism import Parallelism
from ..workload.ranks import position
from ._operator_rows import controls_of
from .reduce import median_over_steps

EVENT_KEYS = ["window", "step", "collective", "group", "ranks", "source", "target", "sequence"]
"""Identity of a transfer; ``match_ranks`` sets the last three for a message."""
_KEYS = ["window", "collective", "role", "num_ranks", "span", "num_nodes", "nbytes"]
# Megatron sends over the group of all ranks in one direction of a pipeline of two stages.
_UNSPECIFIC = (GroupRole.WORLD.value, GroupRole.OTHER.value)


def match_ranks(
    events: pd.DataFrame, layout: Parallelism | None = None, *, is_queued: bool = False
) -> pd.DataFrame:
    """Add to each record its transfer's time: the minimum over the ranks of the group.

    The last rank to arrive waits least, so its duration is the transfer. ``wait_s`` is the
    additional time that a rank stood still. ``is_bound`` marks transfers with only an upper bound:
    no rank has an exact end, or a rank of the group is missing. ``num_nodes`` is 0 if the layout
    does not state the ranks per node. Messages between neighbouring stages belong to the pipeline,
    whatever group they are sent over: Megatron uses that of all ranks for one direction of two.

    ``is_queued``: a group's collectives run in sequence, as on a device. One that was called while
    another ran, such as overlapped gradients, is timed from that one's end if it is known;
    ``is_unsure`` is True if no rank knows it. ``time_s`` is unchanged, measured from the call.
    """
    events = _with_ends(events, layout)
    queued_s, is_unsure = _queued(events, is_queued=is_queued)
    events["_ran_s"] = events["time_s"] - queued_s
    is_sure = ~(events["is_bound"] | is_unsure)
    groups = events.groupby(EVENT_KEYS, sort=False)
    events["transfer_s"] = groups["_ran_s"].transform("min")
    events["nbytes"] = groups["nbytes"].transform("max")
    keys = [events[c] for c in EVENT_KEYS]
    is_exact = (~events["is_bound"]).groupby(keys, sort=False).transform("any")
    seen = groups["rank"].transform("nunique")
    events["is_unsure"] = is_exact & ~is_sure.groupby(keys, sort=False).transform("any")
    events["is_bound"] = ~is_exact | (seen < events["num_ranks"])
    stood = np.minimum(events["exposed_s"], events.pop("_ran_s"))
    events["wait_s"] = np.maximum(stood - events["transfer_s"], 0.0)
    return events


def _queued(
    events: pd.DataFrame, *, is_queued: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the seconds that each collective was queued behind earlier ones of its rank and group.

    Only asynchronous ones with a known end count, behind known earlier ends: otherwise they were
    not in one queue. The second array is True if it may have been queued behind one whose end is
    unknown.
    """
    queued_s, is_unsure = np.zeros(len(events)), np.zeros(len(events), dtype=bool)
    if events.empty or not is_queued:
        return queued_s, is_unsure
    # Messages have a queue for each pair and direction.
    calls = events.reset_index(drop=True)
    calls = calls[calls["source"] < 0].sort_values("issue_ns", kind="stable")
    issue_ns, is_bound = calls["issue_ns"], calls["is_bound"]
    end_ns = issue_ns + (calls["time_s"] * NS_PER_S).round().astype("int64")
    queues = [calls[name] for name in ("window", "step", "rank", "group", "ranks")]

    def before(ends_ns: pd.Series) -> pd.Series:
        return ends_ns.groupby(queues, sort=False).shift(1, fill_value=0)

    known_ns = before(end_ns.where(~is_bound, 0).groupby(queues, sort=False).cummax())
    is_one = calls["is_async"] & ~is_bound
    is_behind = is_one & (known_ns > issue_ns) & (known_ns < end_ns)
    queued_s[calls.index] = (known_ns - issue_ns).where(is_behind, 0) / NS_PER_S
    is_unsure[calls.index] = is_one & (before(end_ns.where(is_bound, 0)) > issue_ns)
    return queued_s, is_unsure


def collective_rows(matched: pd.DataFrame) -> pd.DataFrame:
    """Return one row per window, collective, role, size, span, number of nodes and payload.

    Exact ends take precedence over bounds, and among them those known to have begun at once.
    """
    seen = matched.groupby(_KEYS, sort=True)["rank"].nunique().rename("num_seen")
    events = matched.drop_duplicates(subset=EVENT_KEYS).drop(columns="time_s")
    events = events.rename(columns={"transfer_s": "time_s"})
    events["rank"] = 0
    for worse in ("is_bound", "is_unsure"):
        has_none_better = events.groupby(_KEYS, sort=False)[worse].transform("all")
        events = events[~events[worse] | has_none_better]
    rows = median_over_steps(events, [*_KEYS, "is_bound"])
    rows = rows.drop(columns="num_seen").merge(seen.reset_index(), on=_KEYS)
    return rows.rename(columns={"collective": "kind"})


def probed_collective_rows(
    probes: pd.DataFrame, live: pd.DataFrame, layout: Parallelism | None, *, is_host: bool
) -> pd.DataFrame:
    """Return ``collective_rows`` of probes, which ran between steps: their repeats count as steps.

    ``live`` are the run's own rows. A probe runs by itself, so that disturbances only add to a
    repeat: if a control relates the run's transfers to that, the least of the repeats is used, and
    the correction applied as for operators. On a CPU, where threads have to be woken on busy cores
    for any transfer, the correction is additive, also for kinds without a control of their own; on
    an accelerator it is a ratio within a kind, with the deviation of the controls (``Controls``).
    """
    if probes.empty:
        return pd.DataFrame()
    matched = match_ranks(probes.assign(step=probes["sequence"]), layout)
    rows = collective_rows(matched).assign(is_probe=True)
    least = matched.groupby(_KEYS, sort=True)["transfer_s"].min().rename("least_s").reset_index()
    least = least.rename(columns={"collective": "kind"})
    rows = rows.merge(least, on=[name for name in least if name != "least_s"], how="left")
    pairs = _controls(rows, live)
    least_s = rows["least_s"]
    rows = rows.drop(columns="least_s")
    if live.empty or (is_host and pairs.empty):
        return rows
    if not is_host:
        controls = controls_of(pairs.rename(columns={"least_s": "control_s"}), ["kind"])
        return controls.corrected(rows, ["kind"], least_s, rows["time_s"])
    more_s = float((pairs["live_s"] - pairs["least_s"]).median())
    ratios = (pairs["live_s"] / pairs["least_s"]).groupby(pairs["kind"]).median()
    # A negative difference could exceed a short time: use a ratio instead.
    overall = rows["kind"].map(ratios).fillna(float(ratios.median()))
    times = least_s * np.minimum(overall, 1.0) + max(more_s, 0.0)
    return rows.assign(time_s=times.to_numpy())


_SAME = ["kind", "num_ranks", "num_nodes", "nbytes"]
"""Key of transfers that cost the same, whatever their role."""


def _controls(rows: pd.DataFrame, live: pd.DataFrame) -> pd.DataFrame:
    """Return probes of the run's own transfers: ``least_s``, and ``live_s`` in the window
    before."""
    if live.empty:
        return rows.head(0).assign(live_s=0.0)
    exact = live[~live["is_bound"].astype(bool) & live["window"].isin(rows["window"])]
    inside = exact.groupby(_SAME)["time_s"].median().rename("live_s").reset_index()
    return rows.merge(inside, on=_SAME)


def skew_rows(matched: pd.DataFrame) -> pd.DataFrame:
    """Return the mean waiting and transfer per step of each rank, by role and collective, in
    seconds.

    Together they are the time that it stood still.
    """
    keys = ["window", "rank", "role", "collective"]
    matched = matched.sort_values([*keys, "step", "wait_s"], kind="stable")
    num_steps = matched.groupby(["window", "rank"])["step"].nunique().rename("num_steps")
    stood = np.minimum(matched["exposed_s"], matched["time_s"])
    weight = matched.get("stands_for", 1.0)
    matched = matched.assign(moved_s=(stood - matched["wait_s"]) * weight)
    matched["wait_s"] *= weight
    rows = matched.groupby(keys, sort=True)[["wait_s", "moved_s"]].sum().reset_index()
    rows = rows.rename(columns={"moved_s": "transfer_s"})
    rows = rows.merge(num_steps.reset_index(), on=["window", "rank"])
    rows["wait_s"] /= rows["num_steps"]
    rows["transfer_s"] /= rows["num_steps"]
    return rows


def _with_ends(events: pd.DataFrame, layout: Parallelism | None) -> pd.DataFrame:
    """Add group size, span and nodes; both ends of a send become one transfer of source and
    target."""
    is_send = events["collective"] == Collective.SEND.value
    is_recv = events["collective"] == Collective.RECV.value
    is_pair = is_send | is_recv
    source = events["rank"].where(is_send, events["peer"]).where(is_pair, -1)
    target = events["peer"].where(is_send, events["rank"]).where(is_pair, -1)
    per_node = layout.ranks_per_node if layout is not None else 0
    groups = _groups(events["ranks"].unique(), per_node).reindex(events["ranks"])
    groups = groups.set_index(events.index)
    groups.loc[is_pair.to_numpy()] = np.nan
    apart = source // max(per_node, 1) != target // max(per_node, 1)
    return events.assign(
        collective=events["collective"].where(~is_recv, Collective.SEND.value),
        role=events["role"].where(~_crosses_stages(events["role"], source, target, layout), "pp"),
        source=source,
        target=target,
        num_ranks=groups["num_ranks"].fillna(2).astype("int64"),
        span=groups["span"].fillna((source - target).abs() + 1).astype("int64"),
        num_nodes=groups["num_nodes"].fillna((1 + apart) * (per_node > 0)).astype("int64"),
    )


def _groups(texts: Iterable[str], per_node: int) -> pd.DataFrame:
    """Return ranks, span and nodes of groups by the text of their ranks; nodes are 0 if unknown."""
    rows = {}
    for text in texts:
        ranks = [int(rank) for rank in text.split(",")]
        num_nodes = len({rank // per_node for rank in ranks}) if per_node else 0
        rows[text] = (len(ranks), max(ranks) - min(ranks) + 1, num_nodes)
    columns = ["num_ranks", "span", "num_nodes"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns, dtype="float64")


def _crosses_stages(
    role: pd.Series, source: pd.Series, target: pd.Series, layout: Parallelism | None
) -> pd.Series:
    """Return a mask of messages over an unspecific group between one stage and the next or the
    first."""
    is_open = role.isin(_UNSPECIFIC) & (source >= 0) & (target >= 0)
    if layout is None or layout.pp == 1 or not is_open.any():
        return is_open & False
    known = pd.unique(pd.concat([source[is_open], target[is_open]]))
    stages = {int(r): position(layout, int(r)).stage for r in known if r < layout.num_ranks}
    apart = (source.map(stages) - target.map(stages)).abs()
    return is_open & apart.isin([1, layout.pp - 1])
