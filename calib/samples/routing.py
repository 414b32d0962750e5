"""Tokens that arrive at the experts of each rank: how far from even, and for how long.

In each layer the ranks of an expert-parallel group wait for the one with the most tokens, in the
grouped products and in both exchanges.  So what counts is the busiest rank of each pass over the
mean, not that of the whole window: a rank that is busiest by turns costs as much.
"""

from __future__ import annotations

import pandas as pd

from ..workload.collectives import GroupRole
from ..workload.config import RunConfig
from ..workload.operators import OperatorKind, Phase
from .columns import parse_shape

_GROUPED, _SINGLE = OperatorKind.GROUPED_LINEAR.value, OperatorKind.LINEAR_FC1.value
_PASS = ["window", "step", "microbatch", "layer"]
_ROLES = (GroupRole.EP.value, GroupRole.EXPERT_TP_EP.value)


def routing_rows(
    operators: pd.DataFrame, transfers: pd.DataFrame, config: RunConfig | None
) -> pd.DataFrame:
    """One row per window, rank and layer with experts: rows that arrived, over all recorded passes.

    ``num_most`` sums, pass by pass, those of the busiest rank of the group.  From the events of
    clean steps; passes that a rank of the group has not recorded are left out.  Empty without
    expert parallelism.
    """
    groups = _groups(transfers)
    arrived = _arrived(operators, config)
    if not groups or arrived.empty:
        return pd.DataFrame()
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


def _groups(transfers: pd.DataFrame) -> dict[int, str]:
    """Ranks among which the tokens of a rank are exchanged, as text; the transfers are those of
    groups of several ranks."""
    for role in _ROLES:
        seen = transfers[transfers["role"] == role]
        if not seen.empty:
            return dict(zip(seen["rank"].tolist(), seen["ranks"].tolist(), strict=True))
    return {}


def _arrived(operators: pd.DataFrame, config: RunConfig | None) -> pd.DataFrame:
    """Rows at the experts by rank and pass: one grouped product's, or the sum over experts."""
    forward = operators[operators["phase"] == Phase.FORWARD.value]
    routed = forward[forward["kind"] == OperatorKind.ROUTER.value]
    keys = ["rank", *_PASS]
    layers = pd.MultiIndex.from_frame(routed[keys].drop_duplicates())
    inside = forward[pd.MultiIndex.from_frame(forward[keys]).isin(layers)]
    grouped = inside[inside["kind"] == _GROUPED]
    if not grouped.empty:
        return _summed(grouped.drop_duplicates(keys), keys, 1)
    single = inside[inside["kind"] == _SINGLE]
    shared = _shared_width(config)
    if shared:
        single = single[[parse_shape(s)[2] != shared for s in single["shape"]]]
    return _summed(single, keys, 0)


def _summed(events: pd.DataFrame, keys: list[str], place: int) -> pd.DataFrame:
    found = events.assign(num_rows=[parse_shape(shape)[place] for shape in events["shape"]])
    return found.groupby(keys, sort=True)["num_rows"].sum().reset_index()


def _shared_width(config: RunConfig | None) -> int:
    """Width of the first product of shared experts, which take every token; 0 without any."""
    experts = config.model.experts if config is not None else None
    if config is None or experts is None or not experts.shared_ffn_hidden_size:
        return 0
    gates = 2 if config.model.is_gated else 1
    return experts.shared_ffn_hidden_size // config.parallelism.tp * gates
