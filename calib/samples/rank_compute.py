"""Compute time of each rank in a step, without waiting for others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .table import SampleTable

Floats = NDArray[np.float64]
_PASSES = ("forward-compute", "backward-compute")
# Megatron's timer names.
_DATA = "batch-generator"
_ENDS = ("optimizer",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCompute:
    """Compute time of ranks, seconds, each of shape (samples, ranks), the newest sample last.

    A sample is a step, or a window if there are only summaries.

    ``passes_s`` is the time of all forward and backward passes of the step including their data,
    ``serial_s`` that of work done once: the optimizer, and the time between steps.
    """

    ranks: NDArray[np.int64]
    passes_s: Floats
    serial_s: Floats
    data_s: Floats
    """Part of the passes in which batches are prepared."""
    between_s: Floats
    """Part of ``serial_s`` between two steps."""
    num_newest: int
    """Number of samples in the newest window."""

    @property
    def work_s(self) -> Floats:
        """All compute time, shape (samples, ranks)."""
        return self.passes_s + self.serial_s


def newest_rank_compute(table: SampleTable, *, num_windows: int = 1) -> RankCompute | None:
    """Return the compute time of the ranks in the newest run, in its newest ``num_windows``
    windows.

    It is from the phases of each hooked step, or, if that covers more ranks, from the summaries
    that every rank sends, one sample per window of the whole run. None if there is neither.
    """
    steps, windows = _of_steps(table, num_windows), _of_windows(table)
    if steps is None or (windows is not None and len(windows.ranks) > len(steps.ranks)):
        return windows
    return steps


def _of_steps(table: SampleTable, num_windows: int) -> RankCompute | None:
    steps, phases = table.newest("steps"), table.newest("phases")
    steps = steps[steps["is_clean"] & steps["is_hooked"]]
    phases = phases.assign(own_s=phases["time_s"] - phases["wait_s"] - phases["hook_s"])
    phases = phases.merge(steps[["window", "rank", "step", "gap_s"]], on=["window", "rank", "step"])
    passes = phases[phases["name"].isin(_PASSES)]
    if passes.empty:
        return None
    newest = np.sort(passes["window"].unique())[-num_windows:]
    keys, phases = ["rank", "window", "step"], phases[phases["window"].isin(newest)]

    def self_time_s(names: tuple[str, ...]) -> pd.Series:
        return phases[phases["name"].isin(names)].groupby(keys)["own_s"].sum()

    between = phases.drop_duplicates(subset=keys).set_index(keys)["gap_s"]
    sums = pd.DataFrame(
        {"passes": self_time_s(_PASSES), "data": self_time_s((_DATA,)), "ends": self_time_s(_ENDS)}
    )
    sums = sums.assign(between=between).dropna(subset=["passes"]).fillna(0.0)
    # A step that a rank lacks does not allow a comparison.
    seen = sums.groupby(level=["window", "step"])["passes"].transform("size")
    is_last = sums.index.get_level_values("window") == newest[-1]
    both = sums[seen >= seen[is_last].max()].unstack("rank")
    ranks = both["passes"].iloc[-1].dropna().index
    wide = {name: both[name][ranks].dropna() for name in sums.columns}
    is_newest = wide["passes"].index.get_level_values("window") == newest[-1]
    return _rank_compute(wide, num_newest=int(is_newest.sum()))


def _of_windows(table: SampleTable) -> RankCompute | None:
    rows = table.newest("ranks")
    rows = rows[rows["num_steps"] > 0]
    if rows.empty:
        return None
    rows = rows.assign(passes=rows["forward_s"] + rows["backward_s"], ends=rows["optimizer_s"])
    rows = rows.assign(data=0.0, between=0.0)
    names = ["passes", "ends", "data", "between"]
    wide = {name: rows.pivot(index="window", columns="rank", values=name) for name in names}
    newest = wide["passes"].iloc[-1].dropna().index
    full = wide["passes"][newest].dropna().index
    complete = {name: frame.loc[full, newest] for name, frame in wide.items()}
    return _rank_compute(complete, num_newest=1)


def _rank_compute(wide: Mapping[str, pd.DataFrame], *, num_newest: int) -> RankCompute:
    values = {name: frame.to_numpy(dtype=np.float64) for name, frame in wide.items()}
    return RankCompute(
        ranks=wide["passes"].columns.to_numpy(dtype=np.int64),
        passes_s=values["passes"],
        serial_s=values["ends"] + values["between"],
        data_s=values["data"],
        between_s=values["between"],
        num_newest=num_newest,
    )
