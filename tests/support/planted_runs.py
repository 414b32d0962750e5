"""Sample tables of whole runs whose steps, terms and noise are planted: by step, window and run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from planted_steps import GPU
from planted_stragglers import BACKWARD_S, FORWARD_S, OPTIMIZER_S, config_of, table_of
from related_noise import related_noise

from forerun.calib.samples.columns import normalise
from forerun.calib.samples.table import SampleTable
from forerun.calib.workload.config import Parallelism, RunConfig

LAYOUT = Parallelism(dp=2)
HOST_S, TRANSFER_S = 0.02, 0.03
STEP_S = FORWARD_S + BACKWARD_S + OPTIMIZER_S + HOST_S + TRANSFER_S


def planted_windows(
    draw: np.random.Generator,
    *,
    num_windows: int = 4,
    num_steps: int = 8,
    sigma_log: float = 0.02,
    related: float = 0.0,
    wander_log: float = 0.0,
    run_log: float = 0.0,
    level_log: float = 0.0,
) -> list[NDArray[np.float64]]:
    """Return step times of the windows of a run, seconds, around exp(``level_log``).

    ``wander_log`` moves each window, ``run_log`` the whole run.
    """
    whole = level_log + draw.normal(0.0, run_log)
    return [
        np.exp(
            whole
            + draw.normal(0.0, wander_log)
            + related_noise(draw, num_steps, sigma=sigma_log, related=related)
        )
        for _ in range(num_windows)
    ]


def planted_run(
    draw: np.random.Generator,
    *,
    name: str = "planted",
    extra_s: Mapping[str, float] | None = None,
    slow_rank_s: float = 0.0,
    config: RunConfig | None = None,
    sigma_log: float = 0.01,
    num_windows: int = 4,
    num_steps: int = 8,
) -> SampleTable:
    """Return a run of two data-parallel ranks on a GPU, half of its steps hooked.

    ``extra_s`` adds seconds per step to ``forward``, ``backward``, ``optimizer``, ``host`` or
    ``transfer`` of both ranks; ``slow_rank_s`` to the forward passes of rank 1, for which rank 0
    waits.
    """
    part_times_s = {"forward": FORWARD_S, "backward": BACKWARD_S, "optimizer": OPTIMIZER_S}
    part_times_s |= {"host": HOST_S, "transfer": TRANSFER_S}
    part_times_s = {
        part: time_s + (extra_s or {}).get(part, 0.0) for part, time_s in part_times_s.items()
    }
    rows: dict[str, list[dict[str, object]]] = {
        part: [] for part in ("steps", "phases", "samples", "skew", "ranks")
    }
    for window in range(num_windows):
        factors = np.exp(draw.normal(0.0, sigma_log, 2 * num_steps))
        _add_window(rows, window, part_times_s, factors, slow_rank_s)
    frames = {part: pd.DataFrame(results).fillna(0.0) for part, results in rows.items()}
    table = table_of(LAYOUT, **frames)
    described = config or replace(config_of(LAYOUT), device=GPU)
    runs = table.runs.assign(device=described.device, config="", run_id=name)
    runs.loc[0, "config"] = json.dumps(described.to_json())
    named = {part: getattr(table, part).assign(run_id=name) for part in rows}
    return replace(table, runs=normalise("runs", runs), **named)


def _add_window(
    rows: dict[str, list[dict[str, object]]],
    window: int,
    part_times_s: Mapping[str, float],
    factors: NDArray[np.float64],
    slow_s: float,
) -> None:
    hooked = factors[::2]
    inside = ("forward", "backward", "optimizer")
    for rank in range(2):
        late_s, wait_s = (slow_s, 0.0) if rank else (0.0, slow_s)
        for place, factor in enumerate(factors):
            key = {"window": window, "rank": rank, "step": 1000 * window + place}
            time_s = factor * (sum(part_times_s.values()) + slow_s)
            is_hooked = place % 2 == 0
            rows["steps"].append(
                {**key, "time_s": time_s, "is_hooked": is_hooked, "is_clean": True}
            )
            if not is_hooked:
                continue
            times = {part: factor * part_times_s[part] for part in inside}
            times["forward"] += factor * late_s
            stood_s = factor * (part_times_s["transfer"] + wait_s)
            phases = {
                "forward-compute": {"time_s": times["forward"]},
                "backward-compute": {"time_s": times["backward"]},
                "optimizer": {"time_s": times["optimizer"]},
                "forward-backward": {
                    "time_s": times["forward"] + times["backward"] + stood_s,
                    "wait_s": stood_s,
                },
            }
            rows["phases"] += [{**key, "name": n, "count": 1, **v} for n, v in phases.items()]
        middle = float(np.median(hooked))
        waits = {"transfer_s": middle * part_times_s["transfer"], "wait_s": middle * wait_s}
        rows["skew"].append(
            {"window": window, "rank": rank, "role": "dp", "collective": "all_reduce", **waits}
        )
        sums = {f"{part}_s": middle * part_times_s[part] for part in inside}
        sums["forward_s"] += middle * late_s
        sums["wait_s"] = middle * (part_times_s["transfer"] + wait_s)
        rows["ranks"].append({"window": window, "rank": rank, "num_steps": len(hooked), **sums})
    of_window = {"window": window, "row": "operator", "num_steps": len(hooked), "num_seen": 2}
    of_window |= {"count": 2 * len(hooked), "element_nbytes": 2, "spread_log": 0.01}
    for kind, phase, share, part in (
        ("linear_fc1", "forward", 0.5, "forward"),
        ("core_attention", "forward", 0.5, "forward"),
        ("linear_fc1", "backward", 0.5, "backward"),
        ("core_attention", "backward", 0.5, "backward"),
        ("host_step", "step", 1.0, "host"),
    ):
        times = {"kind": kind, "phase": phase, "time_s": share * part_times_s[part]}
        rows["samples"].append({**of_window, **times})
