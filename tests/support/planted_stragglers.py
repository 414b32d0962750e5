"""Sample tables of runs with random times of every rank, some of them slower."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from itertools import product

import numpy as np
import pandas as pd

from forerun.calib.samples.columns import FRAMES, normalise
from forerun.calib.samples.table import SampleTable
from forerun.calib.workload.config import Batch, ModelShape, Parallelism, RunConfig
from forerun.calib.workload.ranks import position

FORWARD_S, BACKWARD_S, OPTIMIZER_S, GAP_S = 0.30, 0.60, 0.05, 0.002
WORK_S = FORWARD_S + BACKWARD_S + OPTIMIZER_S + GAP_S
NUM_MICROBATCHES = 8
SHAPE = ModelShape(
    num_layers=8,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    seq_length=64,
    vocab_size=512,
)


def config_of(layout: Parallelism) -> RunConfig:
    """Return a run of eight micro-batches in a layout."""
    batch = Batch(micro_batch_size=1, global_batch_size=NUM_MICROBATCHES * layout.dp)
    return RunConfig(model=SHAPE, parallelism=layout, batch=batch)


def table_of(layout: Parallelism, **frames: pd.DataFrame) -> SampleTable:
    """Return a table with these frames; the others are empty but for the run's description."""
    text = json.dumps(config_of(layout).to_json())
    runs = [
        {"rank": rank, "world_size": layout.num_ranks, "config": text if rank == 0 else ""}
        for rank in range(layout.num_ranks)
    ]
    frames = {"runs": pd.DataFrame(runs), **frames}
    empty = {name: pd.DataFrame(columns=list(columns)) for name, columns in FRAMES.items()}
    return SampleTable(
        **{
            name: normalise(name, frames.get(name, empty[name]).assign(run_id="planted"))
            for name in FRAMES
        }
    )


def recorded(
    layout: Parallelism,
    draw: np.random.Generator,
    *,
    sigma_log: float,
    num_steps: int = 10,
    num_windows: int = 1,
    slower: Mapping[int, float] | None = None,
    slower_in: Container[int] = range(1000),
    part: str = "compute",
) -> SampleTable:
    """Return phases of hooked steps: noise of each rank, common noise, and planted excesses.

    ``slower[rank]`` is a share of the passes, spent in ``part`` in the windows ``slower_in``; the
    other ranks wait for the slowest inside their passes.
    """
    ranks = range(layout.num_ranks)
    phases, steps, operators = [], [], []
    for window, step in product(range(num_windows), range(num_steps)):
        planted = slower if slower and window in slower_in else {}
        common = np.exp(sigma_log * draw.standard_normal())
        factor = common * np.exp(sigma_log * draw.standard_normal(layout.num_ranks))
        extra_s = {r: planted.get(r, 0.0) * (FORWARD_S + BACKWARD_S) for r in ranks}
        compute_s = {r: FORWARD_S * factor[r] for r in ranks}
        for rank in ranks:
            if part in ("compute", "data"):
                compute_s[rank] += extra_s[rank]
        latest_s = max(compute_s.values())
        for rank in ranks:
            key = {"window": window, "rank": rank, "step": step, "count": NUM_MICROBATCHES}
            wait_s = latest_s - compute_s[rank]
            phases += [
                {**key, "name": "forward-compute", "time_s": latest_s, "wait_s": wait_s},
                {**key, "name": "backward-compute", "time_s": BACKWARD_S * factor[rank]},
                {**key, "name": "optimizer", "time_s": OPTIMIZER_S * factor[rank]},
            ]
            if part == "data":
                phases.append({**key, "name": "batch-generator", "time_s": extra_s[rank]})
            gap_s = GAP_S + (extra_s[rank] if part == "gap" else 0.0)
            times = {"time_s": 1.0, "gap_s": gap_s, "is_hooked": True, "is_clean": True}
            steps.append({**key, **times})
    for rank in ranks:
        factor = np.exp(sigma_log / np.sqrt(num_steps) * draw.standard_normal())
        time_s = (FORWARD_S + BACKWARD_S) / NUM_MICROBATCHES
        values = {
            "time_s": time_s * factor * (1 + (slower or {}).get(rank, 0.0)),
            "num_steps": num_steps,
        }
        stage = position(layout, rank).stage
        values |= {"stage": stage, "count": NUM_MICROBATCHES * num_steps, "spread_log": sigma_log}
        operators.append({"row": "operator", "kind": "layer", "phase": "forward", **values})
    frames = {"phases": phases, "steps": steps, "samples": operators}
    filled = {name: pd.DataFrame(rows).fillna(0.0) for name, rows in frames.items()}
    return table_of(layout, **filled)


def summarised(
    layout: Parallelism,
    draw: np.random.Generator,
    *,
    sigma_log: float,
    slower: Mapping[int, float] | None = None,
) -> SampleTable:
    """Return the small summaries that every rank sends of a window."""
    factor = np.exp(sigma_log * draw.standard_normal(layout.num_ranks))
    for rank, excess in (slower or {}).items():
        factor[rank] *= 1 + excess
    values = {"forward_s": FORWARD_S * factor, "backward_s": BACKWARD_S * factor}
    ranks = pd.DataFrame({"rank": np.arange(layout.num_ranks), **values})
    return table_of(layout, ranks=ranks.assign(window=0, num_steps=10, optimizer_s=OPTIMIZER_S))
