"""Tokens that arrive at the experts of each rank: their imbalance, and its persistence.

In each layer the ranks of an expert-parallel group wait for the one with the most tokens, in the
grouped products and in both exchanges. The relevant figure is therefore the ratio of each pass's
busiest rank to the mean, not that of the whole window: it costs as much if ranks are busiest by
turns.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..workload.collectives import GroupRole
from ..workload.config import RunConfig
from ..workload.operators import OperatorKind, Phase
from .columns import parse_shape

_GROUPED, _SINGLE = OperatorKind.GROUPED_LINEAR.value, OperatorKind.LINEAR_FC1.value
_PASS = ["window", "step", "microbatch", "layer"]
_WITHIN = _PASS[1:]
_ROLES = (GroupRole.EP.value, GroupRole.EXPERT_TP_EP.value)

Ints = NDArray[np.int64]


def routing_rows(
    operators: pd.DataFrame, transfers: pd.DataFrame, config: RunConfig | None
) -> pd.DataFrame:
    """Return one row per window, rank and layer with experts: rows that arrived, over all recorded
    passes.

    ``num_most`` sums, pass by pass, those of the busiest rank of the group. Rows are from the
    events of clean steps; passes that a rank of the group has not recorded are left out. Empty
    without expert parallelism.
    """
    groups = exchange_groups(transfers)
    arrived = arrived_rows(operators, config)
    if not groups or arrived.empty:
        return pd.DataFrame()
    arrived = arrived.groupby(["rank", *_PASS], sort=True)["num_rows"].sum().reset_index()
    arrived["ranks"] = arrived["rank"].map(groups)
    arrived = arrived.dropna(subset=["ranks"])
    passes = arrived.groupby([*_PASS, "ranks"], sort=False)["num_rows"]
    arrived = arrived.assign(num_most=passes.transform("max"), num_seen=passes.transform("size"))
    sizes = [text.count(",") + 1 for text in arrived["ranks"]]
    whole = arrived[arrived["num_seen"] == sizes]
    rows = whole.groupby(["window", "rank", "layer", "ranks"], sort=True)
    return rows.agg(
        num_rows=("num_rows", "sum"), num_most=("num_most", "sum"), num_passes=("num_rows", "size")
    ).reset_index()


def exchange_groups(transfers: pd.DataFrame) -> dict[int, str]:
    """Return, for each rank, the ranks that it exchanges tokens with, as text; the transfers are
    those of groups of several ranks."""
    for role in _ROLES:
        seen = transfers[transfers["role"] == role]
        if not seen.empty:
            return dict(zip(seen["rank"].tolist(), seen["ranks"].tolist(), strict=True))
    return {}


def arrived_rows(operators: pd.DataFrame, config: RunConfig | None) -> pd.DataFrame:
    """Return rows that arrived by rank, pass and expert of the rank; experts run in sequence.

    If the host of a grouped product did not know the counts of its experts, only their sum is
    returned, with ``expert`` 0.
    """
    forward = operators[operators["phase"] == Phase.FORWARD.value]
    routed = forward[forward["kind"] == OperatorKind.ROUTER.value]
    keys = ["rank", *_PASS]
    layers = pd.MultiIndex.from_frame(routed[keys].drop_duplicates())
    inside = forward[pd.MultiIndex.from_frame(forward[keys]).isin(layers)]
    grouped = inside[inside["kind"] == _GROUPED]
    if not grouped.empty:
        grouped = grouped.drop_duplicates(keys)
        if "rows" in grouped and (grouped["rows"] != "").all():
            return _numbered(
                grouped.assign(num_rows=grouped["rows"].str.split(",")).explode("num_rows")
            )
        return _counted(grouped, 1)
    single = inside[inside["kind"] == _SINGLE]
    shared = _shared_width(config)
    if shared:
        single = single[[parse_shape(s)[2] != shared for s in single["shape"]]]
    return _counted(single, 0)


def _counted(events: pd.DataFrame, place: int) -> pd.DataFrame:
    """Number the events' rows in the order in which they ran, if that is on record."""
    if "start_ns" in events:
        events = events.sort_values("start_ns", kind="stable")
    return _numbered(events.assign(num_rows=[parse_shape(s)[place] for s in events["shape"]]))


def _numbered(events: pd.DataFrame) -> pd.DataFrame:
    keys = ["rank", *_PASS]
    rows = events.assign(
        num_rows=events["num_rows"].astype("int64"),
        expert=events.groupby(keys, sort=False).cumcount(),
        stage=events.get("stage", 0),
    )
    return rows[[*keys, "stage", "expert", "num_rows"]].reset_index(drop=True)


def _shared_width(config: RunConfig | None) -> int:
    """Return the width of the first product of shared experts, which take every token; 0 without
    any."""
    experts = config.model.experts if config is not None else None
    if config is None or experts is None or not experts.shared_ffn_hidden_size:
        return 0
    gates = 2 if config.model.is_gated else 1
    return experts.shared_ffn_hidden_size // config.parallelism.tp * gates


def load_rows(
    operators: pd.DataFrame, transfers: pd.DataFrame, config: RunConfig | None
) -> pd.DataFrame:
    """Return one row per window, stage and number of ranks that the experts could be spread over.

    Counts are sums: experts are placed on ranks in order, so that half as many ranks have those of
    two neighbours each, and twice as many half of one's, as far as the rows of single experts are
    on record. Ranks that would then share their tokens are added up as well. A router sends a token
    to the same experts on any rank.

    ``num_rows`` are all rows that arrived, ``num_most`` pass by pass those of the busiest rank,
    ``num_fullest`` the most of one micro-batch of a rank through all its layers, of
    ``num_microbatches``. Only passes that a whole group has recorded count; empty without experts.
    """
    groups = exchange_groups(transfers)
    arrived = arrived_rows(operators, config)
    if arrived.empty or config is None or config.model.experts is None:
        return pd.DataFrame()
    if not groups:
        if config.parallelism.ep * config.parallelism.expert_tp > 1:
            return pd.DataFrame()
        groups = {rank: str(rank) for rank in arrived["rank"].unique().tolist()}
    arrived["ranks"] = arrived["rank"].map(groups)
    records = []
    for (window, stage), rows in arrived.dropna(subset=["ranks"]).groupby(["window", "stage"]):
        passes, loads = _matrix(rows, config.parallelism.ep)
        records += [
            {"window": window, "stage": stage, **row} for row in _sums_of(passes, loads, config)
        ]
    return pd.DataFrame(records)


def _matrix(rows: pd.DataFrame, ep: int) -> tuple[pd.DataFrame, Ints]:
    """Return the passes of whole groups, and rows by pass and share of the experts, in their order.

    A share is one expert, or all of a rank if only their sum is on record.
    """
    places = {text: _members(text, ep) for text in rows["ranks"].unique().tolist()}
    keys = list(zip(rows["ranks"], rows["rank"], strict=True))
    rows = rows.assign(
        group=[int(text.split(",")[0]) for text, _ in keys],
        share=[places[text].get(rank, -1) for text, rank in keys],
    )
    rows = rows[rows["share"] >= 0]
    experts_per_rank = int(rows["expert"].max()) + 1
    rows = rows.assign(share=rows["share"] * experts_per_rank + rows["expert"])
    whole = rows.set_index(["group", *_WITHIN, "share"])["num_rows"].unstack("share").dropna()
    return whole.index.to_frame(index=False), whole.to_numpy().astype(np.int64)


def _members(text: str, ep: int) -> dict[int, int]:
    """Return indices in a group by rank; of ranks that split each expert between them, only the
    first is included."""
    ranks = [int(rank) for rank in text.split(",")]
    return {rank: place for place, rank in enumerate(ranks[:: max(1, len(ranks) // ep)])}


def _sums_of(passes: pd.DataFrame, loads: Ints, config: RunConfig) -> Iterator[dict[str, int]]:
    width, ep = loads.shape[1], config.parallelism.ep
    for num_ranks in range(2, width + 1):
        if width % num_ranks or not loads.sum():
            continue
        where, joined = _joined(passes, loads, num_ranks // ep)
        of_ranks = joined.reshape(len(joined), num_ranks, -1).sum(axis=2)
        through = pd.DataFrame(of_ranks).groupby([where[k] for k in ("group", *_WITHIN[:2])]).sum()
        yield {
            "num_ranks": num_ranks,
            "num_rows": int(of_ranks.sum()),
            "num_most": int(of_ranks.max(axis=1).sum()),
            "num_fullest": int(through.to_numpy().max()),
            "num_microbatches": len(through),
        }


def _joined(passes: pd.DataFrame, loads: Ints, number: int) -> tuple[pd.DataFrame, Ints]:
    """Return the passes with the tokens of ``number`` neighbouring groups added up, as far as there
    are."""
    groups = np.sort(passes["group"].unique())
    if number < 2 or len(groups) < 2:
        return passes, loads
    place = np.searchsorted(groups, passes["group"].to_numpy()) // number
    keys = passes.assign(group=place)
    sums = pd.DataFrame(loads).groupby([keys[name] for name in keys.columns], sort=True).sum()
    return sums.index.to_frame(index=False), sums.to_numpy()
