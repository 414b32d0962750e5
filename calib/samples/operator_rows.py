"""Operator samples, and the host's share: what a phase or a step takes beyond its operators."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..workload.operators import OperatorKind, Phase
from .reduce import median_over_steps

_KEYS = ["window", "kind", "phase", "shape", "element_nbytes", "stage"]
_COMPUTE = {"forward-compute": Phase.FORWARD.value, "backward-compute": Phase.BACKWARD.value}
_LEAST_BARE_STEPS = 3


def operator_rows(operators: pd.DataFrame) -> pd.DataFrame:
    """One row per window, operator and stage, from the events of clean steps."""
    return median_over_steps(operators, _KEYS)


def host_microbatch_rows(operators: pd.DataFrame, phases: pd.DataFrame) -> pd.DataFrame:
    """Rest of one forward or backward of a stage: neither an operator nor waiting for a collective.

    A phase without any operator gives none: its operators were not recorded.
    """
    compute = phases[phases["is_hooked"] & phases["name"].isin(list(_COMPUTE))]
    hooked = _with_rest(operators, compute)
    if hooked.empty:
        return pd.DataFrame()
    rows = median_over_steps(hooked, ["window", "stage", "name"])
    rows["phase"] = rows["name"].map(_COMPUTE)
    rows["kind"] = OperatorKind.HOST_MICROBATCH.value
    return rows


def host_step_rows(
    operators: pd.DataFrame, phases: pd.DataFrame, steps: pd.DataFrame
) -> pd.DataFrame:
    """Rest of one step beyond forward-backward and optimizer; of bare steps if there are enough."""
    index = ["window", "stage", "rank", "step"]
    whole = phases[phases["name"] == "forward-backward"].groupby(index)["duration_s"].sum()
    rest = steps.set_index(index)[["time_s", "is_hooked"]].loc[lambda f: f.index.isin(whole.index)]
    if rest.empty:
        return pd.DataFrame()
    update = phases[phases["name"] == "optimizer"].groupby(index)[["duration_s", "wait_s"]].sum()
    inner = operators[operators["kind"] == OperatorKind.OPTIMIZER.value]
    own = inner.groupby(index)["time_s"].sum().reindex(update.index)
    taken = (own + update["wait_s"]).fillna(update["duration_s"])
    rest["time_s"] -= whole.reindex(rest.index)
    rest["time_s"] -= taken.reindex(rest.index).fillna(0.0)
    bare = rest[~rest["is_hooked"]]
    if len(bare.index.unique("step")) >= _LEAST_BARE_STEPS:
        rest = bare
    rows = median_over_steps(rest.reset_index(), ["window", "stage"])
    rows["kind"], rows["phase"] = OperatorKind.HOST_STEP.value, Phase.STEP.value
    return rows


def _with_rest(operators: pd.DataFrame, compute: pd.DataFrame) -> pd.DataFrame:
    """Compute phases with the operators inside them; ``time_s`` is what is left."""
    parts = []
    for rank, phases in compute.groupby("rank", sort=True):
        phases = phases.sort_values(["start_ns", "duration_ns"], kind="stable")
        events = operators[operators["rank"] == rank]
        starts = phases["start_ns"].to_numpy()
        ends = starts + phases["duration_ns"].to_numpy()
        at = events["start_ns"].to_numpy()
        home = np.searchsorted(starts, at, side="right") - 1
        inside = (home >= 0) & (at < ends[home]) if len(starts) else np.zeros(len(at), bool)
        taken = np.bincount(home[inside], events["time_s"].to_numpy()[inside], len(starts))
        number = np.bincount(home[inside], minlength=len(starts))
        rest = phases.assign(time_s=phases["duration_s"] - phases["wait_s"] - taken)
        parts.append(rest[number > 0])
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
