"""Samples from probes: work of other layouts, measured between the steps of this one.

A probe runs alone, on data of its own, and so not quite as inside training.  Each kind has a
control, a shape that the run itself has; how far the run's time is from the control's is carried
over to the kind's other shapes.  On a CPU, where the module's own code around the kernels is part
of an operator, that is a difference; on an accelerator, whose clock sees kernels alone, a ratio.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..workload.config import Parallelism
from .reduce import median_over_steps
from .transfers import collective_rows, match_ranks

_SHAPE = ["kind", "phase", "shape", "element_nbytes"]
_KEYS = ["window", *_SHAPE, "stage"]
_MOST_RATIO = 4.0
"""Beyond this on an accelerator a control has met something else, and corrects nothing."""


def probed_operator_rows(
    probes: pd.DataFrame, live: pd.DataFrame, *, is_host: bool
) -> pd.DataFrame:
    """One row per window, operator and stage; ``live`` are the run's own operator rows.

    Events carry ``microbatch`` as the number of the repeat.
    """
    if probes.empty:
        return pd.DataFrame()
    rows = median_over_steps(probes.assign(step=probes["microbatch"]), _KEYS)
    known = rows.merge(controls(rows, live), on=["kind", "phase"], how="left")
    probe_s, live_s = known["control_s"].fillna(1.0), known["live_s"].fillna(1.0)
    ratios = (live_s / probe_s).where(lambda r: r.between(1 / _MOST_RATIO, _MOST_RATIO), 1.0)
    times = known["time_s"] * ratios
    if is_host:
        # A difference below zero could take all of a short time: then it is a ratio as well.
        times = known["time_s"] * np.minimum(live_s / probe_s, 1.0) + np.maximum(
            live_s - probe_s, 0.0
        )
    return rows.assign(time_s=times.to_numpy(), is_probe=True)


def controls(rows: pd.DataFrame, live: pd.DataFrame) -> pd.DataFrame:
    """By kind and phase: ``live_s`` of a shape inside the run and ``control_s`` of its probe."""
    if live.empty:
        return rows[["kind", "phase"]].head(0).assign(control_s=0.0, live_s=0.0)
    inside = live.groupby(_SHAPE)["time_s"].median().rename("live_s").reset_index()
    found = rows.groupby(_SHAPE)["time_s"].median().rename("control_s").reset_index()
    pairs = found.merge(inside, on=_SHAPE)
    return pairs.groupby(["kind", "phase"])[["control_s", "live_s"]].median().reset_index()


def probed_collective_rows(probes: pd.DataFrame, layout: Parallelism | None) -> pd.DataFrame:
    """One row per window, collective, role, group shape and payload."""
    if probes.empty:
        return pd.DataFrame()
    matched = match_ranks(probes.assign(step=probes["sequence"]), layout)
    return collective_rows(matched).assign(is_probe=True)
