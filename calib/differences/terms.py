"""Breakdown of a run's step per window: work by phase and operator, transfers and waiting by group,
optimizer, host, data, and the rest; and work and waiting of each rank.

A rank's step is its work plus its transfers plus its waiting; averaged over ranks that is an
identity, so the terms add up to the step.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..forecast.forecasts import mean_estimate
from ..samples.reduce import MEDIAN_OVER_MEAN
from ..samples.table import SampleTable
from ..timeline.terms import TERM_TEXTS, Term, term_of
from ..workload.collectives import GroupRole
from ..workload.operators import OperatorKind, Phase

ALL_ELSE = "all else"
_PASSES = {Phase.FORWARD: "forward-compute", Phase.BACKWARD: "backward-compute"}
_DATA, _OPTIMIZER = "batch-generator", "optimizer"
_HOST = "host, between steps"
_PARTS = (
    ("forward", "forward-compute"),
    ("backward", "backward-compute"),
    ("optimizer", _OPTIMIZER),
    ("data", _DATA),
)
_OUTER = ("forward-backward", _OPTIMIZER)
"""Phases that contain all others."""
_STEP = ["window", "rank", "step"]
_ONCE = (OperatorKind.HOST_STEP.value, OperatorKind.OPTIMIZER.value)


def step_windows(table: SampleTable) -> dict[int, pd.DataFrame]:
    """Return bare clean steps of each window of the newest run, median over ranks.

    Columns are ``step`` and ``time_s``.  All clean steps count if none is bare.
    """
    steps = table.newest("steps")
    steps = steps[steps["is_clean"]]
    bare = steps[~steps["is_hooked"]]
    rows = (steps if bare.empty else bare).groupby(["window", "step"], sort=True)["time_s"]
    medians = rows.median().reset_index()
    medians = medians[medians["time_s"] > 0]
    return {int(str(window)): part for window, part in medians.groupby("window", sort=True)}


def term_windows(table: SampleTable) -> pd.DataFrame:
    """Return seconds per step of each term, mean over ranks, one row per window.

    The last column, ``ALL_ELSE``, makes them add up to the window's step.
    """
    steps = {w: float(part["time_s"].median()) for w, part in step_windows(table).items()}
    # Mean over ranks of the median over steps.
    medians = _hooked_phases(table).groupby(["name", "window", "rank"], sort=True)["own_s"].median()
    means = medians.groupby(level=["name", "window"]).mean()
    phases = {name: means.loc[name] for name in means.index.get_level_values("name").unique()}
    columns: dict[str, pd.Series] = {}
    for phase, name in _PASSES.items():
        columns |= _of_passes(table, phase, phases.get(name, pd.Series(dtype=float)))
    for name, text in ((_OPTIMIZER, TERM_TEXTS[Term.OPTIMIZER]), (_DATA, "data")):
        if name in phases:
            columns[text] = phases[name]
    rows = _sampled(table)
    rows = rows[rows["kind"] == OperatorKind.HOST_STEP.value]
    if not rows.empty:
        # Once per step, including time between steps; mean over stages.
        columns[_HOST] = rows.groupby("window")["time_s"].mean()
    columns |= _of_groups(table)
    frame = pd.DataFrame(columns, index=pd.Index(sorted(steps), name="window")).fillna(0.0)
    frame[ALL_ELSE] = pd.Series(steps) - frame.sum(axis=1)
    return frame


Scatter = tuple[float, int]
"""Relative standard error of a level from the scatter of its steps, and its degrees of freedom."""


def _scatter(times_s: pd.Series, size_s: float | None = None) -> Scatter:
    """Return the error of the median of times, relative to their mean or to ``size_s``."""
    estimate = mean_estimate(times_s.to_numpy(dtype=np.float64))
    size_s = abs(estimate.mean if size_s is None else size_s)
    error = MEDIAN_OVER_MEAN * estimate.standard_error
    return error / size_s if size_s else 0.0, estimate.degrees


def term_scatter(table: SampleTable, terms: pd.DataFrame) -> dict[str, Scatter]:
    """Return the scatter of a single window's terms over steps; empty for fewer than two steps.

    Operators have the scatter of their pass, transfers and waiting that of all waiting in phases.
    """
    steps = _by_step(table).groupby(level="step").mean()
    if len(steps) < 2:
        return {}
    parts = {str(name): _scatter(steps[name]) for name in steps}
    scatters = {str(name): parts[_source(str(name))] for name in terms if name != ALL_ELSE}
    return {**scatters, ALL_ELSE: _scatter(steps["step"], float(terms[ALL_ELSE].mean()))}


def rank_scatter(table: SampleTable) -> dict[int, dict[str, Scatter]]:
    """Return the scatter of ``work`` and ``waiting`` over steps, by rank."""
    rows = _by_step(table)
    rows = rows.assign(work=rows["forward"] + rows["backward"] + rows["optimizer"])
    return {
        int(str(rank)): {name: _scatter(part[name]) for name in ("work", "waiting")}
        for rank, part in rows.groupby(level="rank", sort=True)
        if len(part) > 1
    }


def _by_step(table: SampleTable) -> pd.DataFrame:
    """Return seconds of parts of a step, one row per hooked clean step and rank."""
    steps = table.newest("steps")
    steps = steps[steps["is_clean"] & steps["is_hooked"]].set_index(["step", "rank"])["time_s"]
    rows = _hooked_phases(table)
    sums = rows.groupby(["step", "rank", "name"])["own_s"].sum().unstack("name").fillna(0.0)
    known = {part: sums.get(name, pd.Series(0.0, index=sums.index)) for part, name in _PARTS}
    inside = rows[rows["name"].isin(_OUTER)].groupby(["step", "rank"])
    parts = pd.DataFrame({**known, "waiting": inside["wait_s"].sum()}).dropna()
    whole_s = steps.reindex(parts.index)
    return parts.assign(step=whole_s, host=whole_s - inside["time_s"].sum()).dropna()


def _source(term: str) -> str:
    """Return the part of a step whose scatter is used for a term."""
    for part, _ in _PARTS:
        if term.endswith(part):
            return part
    if term == TERM_TEXTS[Term.RECOMPUTE]:
        return "backward"
    return "host" if term == _HOST else "waiting"


def rank_windows(table: SampleTable) -> dict[int, pd.DataFrame]:
    """Return ``work`` and ``waiting`` in seconds per step, one row per window, by rank.

    Only ranks that sent summaries are included.
    """
    rows = table.newest("ranks")
    rows = rows[rows["num_steps"] > 0]
    rows = rows.assign(
        work=rows["forward_s"] + rows["backward_s"] + rows["optimizer_s"], waiting=rows["wait_s"]
    )
    return {
        int(str(rank)): part.set_index("window")[["work", "waiting"]]
        for rank, part in rows.groupby("rank", sort=True)
    }


def _hooked_phases(table: SampleTable) -> pd.DataFrame:
    """Return phases of hooked clean steps with their self time, without waiting and hooks."""
    steps = table.newest("steps")
    steps = steps[steps["is_clean"] & steps["is_hooked"]][_STEP]
    rows = table.newest("phases").merge(steps, on=_STEP)
    return rows.assign(own_s=(rows["time_s"] - rows["wait_s"] - rows["hook_s"]).clip(lower=0.0))


def _of_passes(table: SampleTable, phase: Phase, whole_s: pd.Series) -> dict[str, pd.Series]:
    """Return the time of a pass split into terms by the shares of its timed operators.

    If only some passes were timed in detail, their shares are used for all.
    """
    rows = _sampled(table)
    recompute_phase = Phase.RECOMPUTE.value if phase is Phase.BACKWARD else phase.value
    rows = rows[rows["phase"].isin([phase.value, recompute_phase]) & ~rows["kind"].isin(_ONCE)]
    if rows.empty or whole_s.empty:
        return {f"{phase.value} passes": whole_s} if not whole_s.empty else {}
    # Windows without operators use the mean shares of the others.
    sums = rows.groupby(["window", "term"])["whole_s"].sum().unstack("term").fillna(0.0)
    shares = sums.div(sums.sum(axis=1), axis=0).reindex(whole_s.index)
    shares = shares.fillna(shares.mean())
    return {str(name): shares[name] * whole_s for name in shares}


def _sampled(table: SampleTable) -> pd.DataFrame:
    """Return the run's operators with the text of their term and their total time in a window."""
    rows = table.operators
    rows = rows[(rows["run_id"] == table.run_id) & ~rows["is_probe"]]
    return rows.assign(
        term=[_text(k, p) for k, p in zip(rows["kind"], rows["phase"], strict=True)],
        whole_s=rows["time_s"] * rows["count"],
    )


def _text(kind: str, phase: str) -> str:
    term = term_of(OperatorKind(kind), Phase(phase))
    return TERM_TEXTS[term] if term is Term.RECOMPUTE else f"{TERM_TEXTS[term]} {phase}"


def _of_groups(table: SampleTable) -> dict[str, pd.Series]:
    """Return exposed transfers and waiting for late ranks, by role of the group."""
    rows = table.newest("skew")
    if rows.empty:
        return {}
    ranks = rows.groupby("window")["rank"].nunique()
    sums = rows.groupby(["role", "window"], sort=True)[["transfer_s", "wait_s"]].sum()
    roles = [str(role) for role in sums.index.get_level_values("role").unique()]
    columns: dict[str, pd.Series] = {}
    for column, what in (("transfer_s", "transfers"), ("wait_s", "waiting")):
        for role in roles:
            name = f"{role.upper().replace('_', ' ')} {what}"
            if role == GroupRole.PP.value and column == "wait_s":
                name = TERM_TEXTS[Term.BUBBLE]
            columns[name] = sums[column].loc[role] / ranks
    return columns
