"""What each rank does by itself in a step, without the waiting for others."""

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
    """Own time of ranks, seconds, each of shape (samples, ranks); a sample is a step or a window.

    ``passes_s`` has all forward and backward passes of the step and what it takes to get their
    data, ``serial_s`` what comes once: optimizer, and the time between steps.
    """

    ranks: NDArray[np.int64]
    passes_s: Floats
    serial_s: Floats
    data_s: Floats
    """Part of the passes in which batches are made ready."""
    between_s: Floats
    """Part of ``serial_s`` between two steps."""

    @property
    def work_s(self) -> Floats:
        """All of it, shape (samples, ranks)."""
        return self.passes_s + self.serial_s


def newest_rank_compute(table: SampleTable) -> RankCompute | None:
    """Own time of the ranks in the newest run, in its newest window.

    From the phases of each hooked step, or, where that covers more ranks, from the summaries that
    every rank sends, one sample per window of the run.  None where there is neither.
    """
    steps, windows = _of_steps(table), _of_windows(table)
    if steps is None or (windows is not None and len(windows.ranks) > len(steps.ranks)):
        return windows
    return steps


def _of_steps(table: SampleTable) -> RankCompute | None:
    steps, phases = table.newest("steps"), table.newest("phases")
    steps = steps[steps["is_clean"] & steps["is_hooked"]]
    phases = phases.assign(own_s=phases["time_s"] - phases["wait_s"] - phases["hook_s"])
    phases = phases.merge(steps[["window", "rank", "step", "gap_s"]], on=["window", "rank", "step"])
    passes = phases[phases["name"].isin(_PASSES)]
    if passes.empty:
        return None
    newest = phases["window"] == passes["window"].max()
    keys, phases = ["rank", "step"], phases[newest]

    def own(names: tuple[str, ...]) -> pd.Series:
        return phases[phases["name"].isin(names)].groupby(keys)["own_s"].sum()

    between = phases.drop_duplicates(subset=keys).set_index(keys)["gap_s"]
    sums = pd.DataFrame({"passes": own(_PASSES), "data": own((_DATA,)), "ends": own(_ENDS)})
    sums = sums.assign(between=between).dropna(subset=["passes"]).fillna(0.0)
    # A step that one rank lacks compares nothing.
    seen = sums.groupby(level="step")["passes"].transform("size")
    sums = sums[seen == seen.max()]
    wide: Mapping[str, pd.DataFrame] = {c: sums[c].unstack("rank") for c in sums.columns}
    return _rank_compute(wide)


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
    return _rank_compute({name: frame.loc[full, newest] for name, frame in wide.items()})


def _rank_compute(wide: Mapping[str, pd.DataFrame]) -> RankCompute:
    values = {name: frame.to_numpy(dtype=np.float64) for name, frame in wide.items()}
    return RankCompute(
        ranks=wide["passes"].columns.to_numpy(dtype=np.int64),
        passes_s=values["passes"],
        serial_s=values["ends"] + values["between"],
        data_s=values["data"],
        between_s=values["between"],
    )
