"""Transfers of each group, in one window held against the same transfers in another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import stdtr

from ..samples.reduce import MAD_EFFICIENCY, median_error_log

LEAST_CHANGE_FRAC = 0.1
"""Of a group's transfers: links differ by less from one window to the next."""
AGAIN_SIGMA_LOG = 0.02
"""How far the same transfers lie apart in two windows, beyond the noise of their steps."""
_KEYS = ["kind", "role", "num_ranks", "num_nodes", "nbytes", "ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChange:
    """Time per step of the transfers of a group that are in both windows, ranks' waiting left out.

    ``chance`` is how often noise alone would show such a change in any of the groups; 1 for a
    change below ``LEAST_CHANGE_FRAC``.
    """

    role: str
    ranks: tuple[int, ...]
    before_s: float
    after_s: float
    chance: float

    @property
    def change_s(self) -> float:
        """Seconds per step by which they have become slower."""
        return self.after_s - self.before_s


def link_changes(before: pd.DataFrame, after: pd.DataFrame) -> list[LinkChange]:
    """Every group of both windows; the frames are ``links`` of one window each."""
    both = _timed(before).merge(_timed(after), on=_KEYS, suffixes=("_before", "_after"))
    if both.empty:
        return []
    # Transfers of a group share its links: their errors count as one.
    columns = ["own_s_before", "own_s_after", "error_s_before", "error_s_after"]
    groups = both.groupby(["role", "ranks"], sort=True)
    sums = groups[columns].sum()
    sums["freedom"] = MAD_EFFICIENCY * groups[["num_steps_before", "num_steps_after"]].min().sum(
        axis=1
    )
    found = []
    for (role, ranks), row in zip(sums.index.tolist(), sums.to_dict("records"), strict=True):
        old, new = row["own_s_before"], row["own_s_after"]
        error = np.hypot(row["error_s_before"], row["error_s_after"])
        error = np.hypot(error, AGAIN_SIGMA_LOG * old)
        chance = float(stdtr(max(1.0, row["freedom"]), -abs(new - old) / error)) * 2 * len(sums)
        is_small = abs(new - old) < LEAST_CHANGE_FRAC * min(old, new)
        found.append(
            LinkChange(
                role=str(role),
                ranks=tuple(int(rank) for rank in str(ranks).split(",")),
                before_s=float(old),
                after_s=float(new),
                chance=1.0 if is_small else min(1.0, chance),
            )
        )
    return found


def _timed(links: pd.DataFrame) -> pd.DataFrame:
    rows = links[links["num_steps"] > 1]
    own_s = rows["time_s"] * rows["count"] / rows["num_steps"]
    error_s = median_error_log(rows) * own_s
    return rows[[*_KEYS, "num_steps"]].assign(own_s=own_s, error_s=error_s)
