"""What a sample table says of the running layout before anything is modelled."""

from __future__ import annotations

import math

import numpy as np

from ..errors import CalibrationError
from ..forecast.forecast import DRIFT_FRAC, mean_estimate
from ..memory.peak import memory_offset
from ..samples.table import SampleTable
from ..samples.windows import only_windows, windows_of
from ..workload.operators import OperatorKind
from .overhead import Overhead, overhead
from .transcript import HookSummary

ONE_STEP_SIGMA_LOG = 0.1
"""Spread of single steps, where one step is all that was measured."""
_HOST_KINDS = (OperatorKind.HOST_MICROBATCH.value, OperatorKind.HOST_STEP.value)


def measured_step_s(table: SampleTable) -> float:
    """Median bare step of the newest window, seconds; all clean steps where none was bare."""
    newest = only_windows(table, windows_of(table)[-1:])
    times = newest.step_times_s(is_hooked=False)
    if not times.size:
        times = newest.step_times_s()
    if not times.size:
        raise CalibrationError("no unflagged step in the newest window; record more steps")
    return float(np.median(times))


def measured_sigma_log(table: SampleTable) -> float:
    """How well the bare steps of the newest window tell the level of the run."""
    newest = only_windows(table, windows_of(table)[-1:])
    times = newest.step_times_s(is_hooked=False)
    if times.size < 2:
        times = newest.step_times_s()
    if times.size < 2:
        return ONE_STEP_SIGMA_LOG
    found = mean_estimate(times)
    return math.hypot(found.standard_error / found.mean, DRIFT_FRAC)


def recalibration_s(table: SampleTable) -> float:
    """What a new calibration costs, seconds: what the first window, warm-up among it, took longer
    than as many bare steps."""
    steps = table.steps[table.steps["run_id"] == table.run_id]
    first = steps[steps["window"] == steps["window"].min()]
    times = first.groupby("step", sort=True)["time_s"].median()
    return max(0.0, float(times.sum()) - len(times) * measured_step_s(table))


def memory_offset_nbytes(table: SampleTable) -> int | None:
    """What the measured peak of the newest run had beyond its estimate; None where not measured."""
    peaks = table.memory_peak_nbytes()
    return memory_offset(table.config(), max(peaks.values())) if peaks else None


def mean_waiting_s(table: SampleTable) -> float:
    """Waiting for later ranks per step in the newest window, mean over ranks, seconds.

    A rank's step is its own work plus its waiting; averaged over ranks that is an identity, so
    this much of a step belongs to no operator.  Waiting of stages for each other is the timeline's.
    """
    rows = table.skew[(table.skew["run_id"] == table.run_id) & (table.skew["role"] != "pp")]
    rows = rows[rows["window"] == rows["window"].max()]
    return float(rows["wait_s"].sum()) / max(1, rows["rank"].nunique())


def perturbation_s(table: SampleTable, cost: Overhead | None) -> float:
    """What hooks slow a step down by, seconds, beyond the time inside them, which is taken off.

    Operators are timed in hooked steps, while the bare ones are what the run is made of.
    """
    if cost is None:
        return 0.0
    inside = table.phases[table.phases["name"].isin(["forward-backward", "optimizer"])]
    hooked = table.steps[table.steps["is_clean"] & table.steps["is_hooked"]]
    known_s = float(hooked["hook_s"].median())
    known_s += float(inside.groupby(["rank", "step"])["hook_s"].sum().median())
    bare = table.steps[table.steps["is_clean"] & ~table.steps["is_hooked"]]
    return max(0.0, cost.overhead_frac * float(bare["time_s"].median()) - known_s)


def hook_summary(table: SampleTable) -> HookSummary:
    """Installed and fired hooks of the newest window, operator kinds and groups seen."""
    rows = table.coverage[table.coverage["run_id"] == table.run_id]
    rows = rows[rows["window"] == rows["window"].max()]
    seen = table.operators[~table.operators["is_probe"]]
    transfers = table.collectives[~table.collectives["is_probe"]]
    kinds = set(seen["kind"]) - set(_HOST_KINDS)
    groups = set(zip(transfers["role"], transfers["num_ranks"], strict=True))
    return HookSummary(
        num_fired=int(rows["fired"].clip(upper=rows["installed"]).sum()),
        num_installed=int(rows["installed"].sum()),
        num_operator_kinds=len(kinds),
        num_groups=len(groups),
        remarks=tuple(sorted(set(rows.loc[rows["installed"] == 0, "name"]))),
    )


def measured_overhead(table: SampleTable) -> Overhead | None:
    """Of all windows together; None where there are too few steps of either kind."""
    steps = table.steps[(table.steps["run_id"] == table.run_id) & table.steps["is_clean"]]
    by_step = steps.groupby("step", sort=True).agg(
        time_s=("time_s", "median"), is_hooked=("is_hooked", "max")
    )
    try:
        return overhead(by_step["time_s"].to_numpy(), by_step["is_hooked"].to_numpy())
    except CalibrationError:
        return None
