"""Operator samples, the host's time beyond them, and additional samples from probes and traces.

The ratio of the run's own work to its probes is estimated with its uncertainty for other shapes.

A probe on an accelerator runs kernels of ours: not those of the model, whose products may include a
norm and whose attention may be another library's.  A control is a shape that both have timed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..workload.operators import OperatorKind, Phase
from .reduce import median_error_log, median_over_steps, spread_of_error

_MOST_RATIO = 4.0
"""Largest plausible ratio: a control beyond it was disturbed, and corrects nothing."""
_PRIOR_LOG = math.log(_MOST_RATIO) / 3.0
"""Prior deviation before any control is known: the rejection bound is three of them."""
_PRIOR_WEIGHT = 1.0
"""Number of controls that the prior is worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """Log ratios of the run's time to the probe's by key, and their deviations."""

    log_ratios: Mapping[Hashable, float]
    """Median over the controls of a key."""
    numbers: Mapping[Hashable, int]
    of_keys_log: float
    """Deviation of a key's ratio from 1."""
    of_shapes_log: float
    """Deviation of a shape's ratio from its key's."""

    def corrected(
        self, rows: pd.DataFrame, keys: list[str], corrected_s: pd.Series, bare_s: pd.Series
    ) -> pd.DataFrame:
        """Return the rows with estimated times in the run, ``corrected_s`` times the ratio if there
        is one and ``bare_s`` otherwise, and with the error of that in ``spread_log``."""
        names = list(rows[keys].itertuples(index=False, name=None))
        logs = np.array([self.log_ratios.get(name, np.nan) for name in names])
        number = np.array([self.numbers.get(name, 0) for name in names])
        width = np.where(
            number > 0,
            # Deviation of a shape from its key, plus that of the key's median over so many
            # controls.
            self.of_shapes_log * np.sqrt(1.0 + 1.0 / np.maximum(number, 1)),
            self.of_keys_log,
        )
        times = np.where(number > 0, corrected_s * np.exp(np.nan_to_num(logs)), bare_s)
        error_log = np.hypot(median_error_log(rows), width)
        return rows.assign(time_s=times, spread_log=spread_of_error(rows, error_log))


def controls_of(pairs: pd.DataFrame, keys: list[str]) -> Controls:
    """Estimate controls from pairs of ``live_s`` and ``control_s``, one row for each shape.

    Shapes of a key are assumed to differ as much as keys do until keys with several controls
    determine it. The scatter of repeats is not included.
    """
    known = pairs.assign(log=np.log(pairs["live_s"] / pairs["control_s"]))
    known = known[known["log"].abs() <= math.log(_MOST_RATIO)]
    groups = known.groupby(keys, sort=True)["log"]
    centers = groups.median()
    numbers = groups.size()
    of_keys = _deviation(centers.to_numpy(dtype=np.float64), _PRIOR_LOG, len(centers))
    within = (known["log"] - groups.transform("mean")).to_numpy(dtype=np.float64)
    of_shapes = _deviation(within, of_keys, int((numbers - 1).sum()))
    names = [name if isinstance(name, tuple) else (name,) for name in centers.index]
    return Controls(
        log_ratios=dict(zip(names, centers.tolist(), strict=True)),
        numbers=dict(zip(names, numbers.tolist(), strict=True)),
        of_keys_log=of_keys,
        of_shapes_log=of_shapes,
    )


def _deviation(values: NDArray[np.float64], prior: float, freedom: int) -> float:
    """Return the root of the mean square about 0 with ``freedom`` degrees of freedom, shrunk to the
    prior."""
    square = float(np.sum(values**2)) + _PRIOR_WEIGHT * prior**2
    return math.sqrt(square / (freedom + _PRIOR_WEIGHT))


_SHAPE = ["kind", "phase", "shape", "element_nbytes"]
_KEYS = ["window", *_SHAPE, "stage"]
_COMPUTE = {"forward-compute": Phase.FORWARD.value, "backward-compute": Phase.BACKWARD.value}
_MOST_HOST_FRAC = 0.5
"""Share of waiting for the host above which a shape is no control of the device's time."""
_STEP = ["window", "stage", "rank", "step"]
_PASS = [*_STEP, "microbatch"]
_FINISH = (
    "all-grads-sync",
    "embedding-grads-all-reduce",
    "conditional-embedder-grads-all-reduce",
    "non-tensor-parallel-grads-all-reduce",
)


def operator_rows(operators: pd.DataFrame) -> pd.DataFrame:
    """Return one row per window, operator and stage, from the events of clean steps."""
    rows = median_over_steps(operators, _KEYS, is_weighted=True)
    keys = [*_KEYS, "rank", "step"]
    times = operators[["host_bound_s", "time_s"]].mul(operators["stands_for"], axis=0)
    sums = operators[keys].join(times).groupby(keys, sort=True).sum()
    share = (sums["host_bound_s"] / sums["time_s"]).fillna(0.0).groupby(_KEYS, sort=True).median()
    rows = rows.assign(host_bound_frac=share.to_numpy())
    host = _host_times(operators).reindex(pd.MultiIndex.from_frame(rows[_KEYS])).fillna(0.0)
    return rows.assign(
        host_s=host["time_s"].to_numpy(), host_spread_log=host["spread_log"].to_numpy()
    )


def _host_times(operators: pd.DataFrame) -> pd.DataFrame:
    """Return the host's seconds for each operator, by its keys, from the events that recorded them.

    A host takes about twice as long for the first layer of a pass, which is left out if others are
    known; each step contributes its median.
    """
    passes = operators.sort_values("start_ns", kind="stable").groupby([*_PASS, "phase"])
    is_first = operators["layer"] == passes["layer"].transform("first").reindex(operators.index)
    known = operators.assign(is_first=is_first)[operators["host_s"] > 0.0]
    is_alone = known.groupby(_KEYS)["is_first"].transform("all")
    known = known[~known["is_first"] | is_alone]
    steps = known.groupby([*_KEYS, "rank", "step"], sort=True)["host_s"].median()
    return median_over_steps(steps.rename("time_s").reset_index(), _KEYS).set_index(_KEYS)


def probed_operator_rows(
    probes: pd.DataFrame, live: pd.DataFrame, *, is_host: bool
) -> pd.DataFrame:
    """Return one row per window, operator and stage; ``live`` are the run's own operator rows.

    A probe is work of another layout, measured between the steps of this one: alone, on data of its
    own, and so not quite as inside training. Each kind has a control, a shape that the run itself
    has; the difference of the run's time from the control's is applied to the kind's other shapes.
    On a CPU, whose operator times include the module's own code around the kernels, it is additive;
    on an accelerator, whose clock times kernels alone, it is a ratio, with the deviation of the
    controls (``Controls``). A shape that waited for the host in training is no control: its time
    there is not the device's. Without a run no correction is made.

    Events carry ``microbatch`` as the number of the repeat.
    """
    if probes.empty:
        return pd.DataFrame()
    rows = median_over_steps(probes.assign(step=probes["microbatch"]), _KEYS).assign(is_probe=True)
    pairs = _controls(rows, live)
    if not is_host:
        if live.empty:
            return rows
        controls = controls_of(pairs, ["kind", "phase"])
        return controls.corrected(rows, ["kind", "phase"], rows["time_s"], rows["time_s"])
    known = pairs.groupby(["kind", "phase"])[["control_s", "live_s"]].median().reset_index()
    known = rows.merge(known, on=["kind", "phase"], how="left")
    probe_s, live_s = known["control_s"].fillna(1.0), known["live_s"].fillna(1.0)
    # A negative difference could exceed a short time: use a ratio instead.
    times = known["time_s"] * np.minimum(live_s / probe_s, 1.0) + np.maximum(live_s - probe_s, 0.0)
    return rows.assign(time_s=times.to_numpy())


def _controls(rows: pd.DataFrame, live: pd.DataFrame) -> pd.DataFrame:
    """Return the controls by shape and phase: ``live_s`` inside the run and ``control_s`` of its
    probe."""
    if not live.empty:
        live = live[live["host_bound_frac"] <= _MOST_HOST_FRAC]
    if live.empty:
        return rows[_SHAPE].head(0).assign(control_s=0.0, live_s=0.0)
    inside = live.groupby(_SHAPE)["time_s"].median().rename("live_s").reset_index()
    controls = rows.groupby(_SHAPE)["time_s"].median().rename("control_s").reset_index()
    return controls.merge(inside, on=_SHAPE)


def traced_rows(traces: pd.DataFrame) -> pd.DataFrame:
    """Return one row per operator of the traced steps: its median time, and the most kernels of a
    single execution.

    ``time_s`` is the time of its kernels without the gaps between them; on a CPU, of its calls.
    """
    groups = traces.groupby(_KEYS, sort=True)
    return groups.agg(
        time_s=("time_s", "median"),
        count=("time_s", "size"),
        num_kernels=("num_kernels", "max"),
    ).reset_index()


def host_microbatch_rows(operators: pd.DataFrame, phases: pd.DataFrame) -> pd.DataFrame:
    """Return the rest of one forward or backward of a stage: neither an operator, nor waiting, nor
    our hooks.

    Time of the schedule between passes is counted with the forward ones. A pass without any
    operator is left out: its operators were not recorded.
    """
    compute = phases[phases["is_hooked"] & phases["name"].isin(list(_COMPUTE))]
    hooked = _with_rest(operators, compute)
    if hooked.empty or not hooked["has_operators"].any():
        return pd.DataFrame()
    hooked = hooked[hooked["has_operators"]].reset_index(drop=True)
    between = _between_passes(phases).reindex(pd.MultiIndex.from_frame(hooked[_STEP]))
    is_forward = (hooked["name"] == "forward-compute").to_numpy()
    hooked["time_s"] += np.where(is_forward, between.fillna(0.0).to_numpy(), 0.0)
    rows = median_over_steps(hooked, ["window", "stage", "name"])
    rows["phase"] = rows["name"].map(_COMPUTE)
    rows["kind"] = OperatorKind.HOST_MICROBATCH.value
    return rows


def with_added(steps: pd.DataFrame, operators: pd.DataFrame, phases: pd.DataFrame) -> pd.DataFrame:
    """Return the steps with ``added_s``: how many seconds longer the passes with recorded operators
    took than others of the step; 0 for steps without passes of both kinds."""
    passes = _with_rest(
        operators, phases[phases["is_hooked"] & phases["name"].isin(list(_COMPUTE))]
    )
    if passes.empty:
        return steps
    keys, is_timed = [*_STEP, "name"], passes["has_operators"]
    times = passes["duration_s"] - passes["wait_s"]
    others = times[~is_timed].groupby([passes[key] for key in keys]).median()
    timed = times[is_timed].groupby([passes[key] for key in keys]).agg(["sum", "size"])
    added = (timed["sum"] - timed["size"] * others).dropna()
    by_step = added.groupby(_STEP).sum().reindex(pd.MultiIndex.from_frame(steps[_STEP]))
    return steps.assign(added_s=by_step.fillna(0.0).to_numpy())


def host_step_rows(phases: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the rest of one step beyond its passes and the optimizer, without our own hooks.

    It includes the part of the gradients' finalisation that waits for no collective.
    """
    whole = _sums(phases, ["forward-backward"], "duration_s")
    update = _sums(phases, ["optimizer"], "duration_s")
    finish = _self_time_s(phases, _FINISH)
    rest = steps.set_index(_STEP)[["time_s", "hook_s"]].loc[lambda f: f.index.isin(whole.index)]
    if rest.empty:
        return pd.DataFrame()
    rest["time_s"] += finish.reindex(rest.index).fillna(0.0) - rest["hook_s"]
    rest["time_s"] -= whole.reindex(rest.index) + update.reindex(rest.index).fillna(0.0)
    rows = median_over_steps(rest.reset_index(), ["window", "stage"])
    rows["kind"], rows["phase"] = OperatorKind.HOST_STEP.value, Phase.STEP.value
    return rows


def _between_passes(phases: pd.DataFrame) -> pd.Series:
    """Return the self time of forward-backward outside its passes and finalisation, per forward
    pass, by step."""
    whole = _self_time_s(phases, ["forward-backward"])
    inside = _self_time_s(phases, [*_COMPUTE, *_FINISH]).reindex(whole.index).fillna(0.0)
    passes = phases[phases["name"] == "forward-compute"].groupby(_STEP)["name"].size()
    return (whole - inside).clip(lower=0.0) / passes.reindex(whole.index)


def _self_time_s(phases: pd.DataFrame, names: Iterable[str]) -> pd.Series:
    """Return the time of the phases by step, without waiting and without our hooks."""
    return (
        _sums(phases, names, "duration_s")
        - _sums(phases, names, "wait_s")
        - _sums(phases, names, "hook_s")
    )


def _sums(phases: pd.DataFrame, names: Iterable[str], column: str) -> pd.Series:
    return phases[phases["name"].isin(list(names))].groupby(_STEP)[column].sum()


def _with_rest(operators: pd.DataFrame, compute: pd.DataFrame) -> pd.DataFrame:
    """Return the compute phases with ``has_operators``; ``time_s`` is the time outside these."""
    parts = []
    for rank, phases in compute.groupby("rank", sort=True):
        phases = phases.sort_values(["start_ns", "duration_ns"], kind="stable")
        events = operators[operators["rank"] == rank]
        starts = phases["start_ns"].to_numpy()
        ends = starts + phases["duration_ns"].to_numpy()
        at = events["start_ns"].to_numpy()
        home = np.searchsorted(starts, at, side="right") - 1
        inside = (home >= 0) & (at < ends[home]) if len(starts) else np.zeros(len(at), bool)
        times = (events["time_s"] * events["stands_for"]).to_numpy()
        taken = np.bincount(home[inside], times[inside], len(starts))
        number = np.bincount(home[inside], minlength=len(starts))
        free = phases["duration_s"] - phases["wait_s"] - phases["hook_s"]
        parts.append(phases.assign(time_s=free - taken, has_operators=number > 0))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
