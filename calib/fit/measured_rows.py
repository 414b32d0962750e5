"""Rows that models are fitted on: one per distinct operator or collective, with windows joined."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from ..network.groups import Measured, num_nodes
from ..regressors.estimate import Estimate
from ..samples.columns import parse_shape, shape_text
from ..samples.neighbours import smooth_over_neighbours
from ..samples.reduce import median_error_log
from ..samples.table import SampleTable
from ..workload.collectives import Collective, CollectiveCall, GroupRole
from ..workload.operators import Operator, OperatorKind, Phase

AGE_FACTOR = 0.7
"""Ratio of a window's weight to that of the next one: old rows count less and are never dropped."""
REPEAT_SIGMA_LOG = 0.02
"""Deviation between medians of repeated measurements of the same work (public A100 duplicates)."""
_OPERATOR = ["kind", "phase", "shape", "element_nbytes"]
_HOST_KINDS = (OperatorKind.HOST_MICROBATCH, OperatorKind.HOST_STEP)
_MOST_STEPS = 20
"""Steps from which a window has full weight: averaging over more does not remove drift."""


def measured_operators(table: SampleTable) -> dict[Operator, Measured]:
    """Return each distinct operator with its time, in a fixed order, without the host kinds.

    An operator for which the device waited has the time of its kernels too, if a step was traced.
    """
    rows = _with_weight(table, smooth_over_neighbours(table.operators))
    rows = rows[~rows["kind"].isin([kind.value for kind in _HOST_KINDS])]
    measured = {}
    for key, group in _groups(rows, _OPERATOR):
        operator, one = _operator(*key), _join(_live_first(group))
        if one.is_host_bound:
            one = replace(one, kernel_s=_kernel_s(operator, table.traced))
        measured[operator] = one
    return measured


def _operator(kind: str, phase: str, shape: str, nbytes: int) -> Operator:
    return Operator(
        kind=OperatorKind(kind),
        phase=Phase(phase),
        shape=parse_shape(shape),
        element_nbytes=int(nbytes),
    )


def _kernel_s(operator: Operator, traced: pd.DataFrame) -> float:
    """Return the operator's time in traced steps, of both gradients where a recording has them
    apart, as all did before; 0 if not all of it was traced."""
    like = traced[
        (traced["kind"] == operator.kind.value)
        & (traced["shape"] == shape_text(operator.shape))
        & (traced["element_nbytes"] == operator.element_nbytes)
    ]
    times = like.groupby("phase")["time_s"].median()
    parts = [operator.phase.value]
    if parts[0] not in times and operator.phase is Phase.BACKWARD:
        parts = [Phase.INPUT_GRADIENT.value, Phase.WEIGHT_GRADIENT.value]
    return sum(float(times[part]) for part in parts) if set(parts) <= set(times.index) else 0.0


def measured_host(table: SampleTable) -> dict[tuple[OperatorKind, Phase], Measured]:
    """Return the host's constants: means over stages and windows, weighted towards recent ones."""
    rows = _with_weight(table, table.operators)
    measured = {}
    for kind in _HOST_KINDS:
        for (phase,), group in _groups(rows[rows["kind"] == kind.value], ["phase"]):
            joined = _join(group)
            mean_s = float(np.average(group["time_s"], weights=group["weight"]))
            measured[kind, Phase(phase)] = replace(joined, time_s=mean_s)
    return measured


def measured_collectives(table: SampleTable) -> dict[CollectiveCall, Measured]:
    """Return each distinct collective with its transfer time, in a fixed order."""
    rows = _with_weight(table, smooth_over_neighbours(table.collectives))
    per_node = table.ranks_per_node()
    sizes = zip(rows["num_ranks"], rows["span"], rows["num_nodes"], strict=True)
    # Tables without counted nodes only have the span, which is right for contiguous groups.
    rows["num_nodes"] = [
        int(known) or min(int(number), num_nodes(int(span), per_node))
        for number, span, known in sizes
    ]
    measured = {}
    for (kind, role, num_ranks, nodes, nbytes), group in _groups(
        rows, ["kind", "role", "num_ranks", "num_nodes", "nbytes"]
    ):
        group = _live_first(group)
        exact = group[~group["is_bound"]]
        call = CollectiveCall(
            collective=Collective(kind),
            role=GroupRole(role),
            num_ranks=int(num_ranks),
            nbytes=int(nbytes),
            num_nodes=int(nodes),
        )
        joined = _join(group if exact.empty else exact)
        measured[call] = replace(joined, is_bound=exact.empty)
    return measured


def _groups(rows: pd.DataFrame, keys: list[str]) -> Iterable[tuple[tuple[Any, ...], pd.DataFrame]]:
    # For a list of one key, pandas 1.5 yields the bare value (with a warning), pandas 2 a tuple.
    for key, group in rows.groupby(keys if len(keys) > 1 else keys[0], sort=True):
        name: Hashable = key
        yield (name if isinstance(name, tuple) else (name,)), group


def _with_weight(table: SampleTable, rows: pd.DataFrame) -> pd.DataFrame:
    """Add to each row a weight, from its window's age and number of steps, and the error of its log
    time."""
    starts = table.runs.groupby("run_id")["started_unix_s"].min()
    order = rows[["run_id", "window"]].drop_duplicates()
    order = order.assign(start=order["run_id"].map(starts).fillna(0.0))
    order = order.sort_values(["start", "run_id", "window"], ascending=False, kind="stable")
    order["age"] = np.arange(len(order))
    rows = rows.merge(order[["run_id", "window", "age"]], on=["run_id", "window"], how="left")
    steps = rows["num_steps"].clip(lower=1, upper=_MOST_STEPS)
    weight = AGE_FACTOR ** rows["age"] * steps / _MOST_STEPS
    return rows.assign(weight=weight, error_log=median_error_log(rows))


def _live_first(group: pd.DataFrame) -> pd.DataFrame:
    """Return the exact rows of the run itself; if there are none, all rows, probes included."""
    live = group[~group["is_probe"] & ~group["is_bound"]]
    return group if live.empty else live


def _join(group: pd.DataFrame) -> Measured:
    weights = group["weight"].to_numpy(dtype=np.float64)
    known, time = group[group["host_s"] > 0.0], _mean(group, "time_s", "error_log")
    return Measured(
        time_s=time.median,
        sigma_log=time.sigma_log,
        weight=float(weights.max()),
        num_rows=len(group),
        is_probe=bool(group["is_probe"].all()),
        host_bound_frac=float(np.average(group["host_bound_frac"], weights=weights)),
        host=None if known.empty else _mean(known, "host_s", "host_spread_log"),
    )


def _mean(rows: pd.DataFrame, time: str, error: str) -> Estimate:
    """Return the weighted mean of a column of times in seconds.

    The spread between rows is preserved: joining rows that differ does not make them more certain.
    """
    weights = rows["weight"].to_numpy(dtype=np.float64)
    logs = np.log(rows[time].to_numpy(dtype=np.float64))
    center = float(np.average(logs, weights=weights))
    between = float(np.average((logs - center) ** 2, weights=weights))
    within = float(np.average(rows[error] ** 2, weights=weights))
    sigma = math.sqrt(REPEAT_SIGMA_LOG**2 + within + between)
    return Estimate(median=math.exp(center), unshared_sigma_log=sigma)
