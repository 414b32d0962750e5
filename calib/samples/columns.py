"""The frames of a sample table: their columns, types and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

TABLE_SCHEMA = 1

FRAMES: Mapping[str, Mapping[str, str]] = {
    "samples": {
        "run_id": "str",
        "window": "int64",
        "row": "str",
        "kind": "str",
        "phase": "str",
        "shape": "str",
        "element_nbytes": "int64",
        "stage": "int64",
        "role": "str",
        "num_ranks": "int64",
        "span": "int64",
        "num_nodes": "int64",
        "nbytes": "int64",
        "is_bound": "bool",
        "time_s": "float64",
        "count": "int64",
        "num_steps": "int64",
        "num_seen": "int64",
        "spread_log": "float64",
        "is_probe": "bool",
    },
    "steps": {
        "run_id": "str",
        "window": "int64",
        "rank": "int64",
        "step": "int64",
        "time_s": "float64",
        "gap_s": "float64",
        "hook_s": "float64",
        "is_hooked": "bool",
        "is_clean": "bool",
        "flags": "str",
    },
    "phases": {
        "run_id": "str",
        "window": "int64",
        "rank": "int64",
        "step": "int64",
        "name": "str",
        "count": "int64",
        "time_s": "float64",
        "wait_s": "float64",
        "hook_s": "float64",
    },
    "skew": {
        "run_id": "str",
        "window": "int64",
        "rank": "int64",
        "role": "str",
        "collective": "str",
        "wait_s": "float64",
        "transfer_s": "float64",
        "num_steps": "int64",
    },
    "arrivals": {
        "run_id": "str",
        "window": "int64",
        "rank": "int64",
        "role": "str",
        "num_events": "int64",
        "num_last": "int64",
        "late_s": "float64",
        "num_steps": "int64",
    },
    "clocks": {
        "run_id": "str",
        "window": "int64",
        "rank": "int64",
        "reference": "int64",
        "offset_s": "float64",
        "low_s": "float64",
        "high_s": "float64",
        "drift_frac": "float64",
        "num_moments": "int64",
        "num_dropped": "int64",
        "is_reached": "bool",
        "is_shared": "bool",
    },
    "links": {
        "run_id": "str",
        "window": "int64",
        "kind": "str",
        "role": "str",
        "num_ranks": "int64",
        "num_nodes": "int64",
        "nbytes": "int64",
        "ranks": "str",
        "time_s": "float64",
        "exposed_s": "float64",
        "count": "int64",
        "num_steps": "int64",
        "spread_log": "float64",
    },
    "ranks": {
        "run_id": "str",
        "window": "int64",
        "rank": "int64",
        "num_steps": "int64",
        "step_s": "float64",
        "forward_s": "float64",
        "backward_s": "float64",
        "optimizer_s": "float64",
        "wait_s": "float64",
    },
    "traced": {
        "run_id": "str",
        "window": "int64",
        "kind": "str",
        "phase": "str",
        "shape": "str",
        "element_nbytes": "int64",
        "stage": "int64",
        "time_s": "float64",
        "count": "int64",
        "num_kernels": "int64",
    },
    "coverage": {
        "run_id": "str",
        "window": "int64",
        "rank": "int64",
        "name": "str",
        "installed": "int64",
        "fired": "int64",
    },
    "windows": {
        "run_id": "str",
        "window": "int64",
        "rank": "int64",
        "first_step": "int64",
        "last_step": "int64",
        "num_faults": "int64",
        "num_dropped": "int64",
        "memory_peak_nbytes": "int64",
        "device_memory_nbytes": "int64",
    },
    "runs": {
        "run_id": "str",
        "rank": "int64",
        "world_size": "int64",
        "stage": "int64",
        "tp_rank": "int64",
        "dp_rank": "int64",
        "device": "str",
        "created_by": "str",
        "started_unix_s": "float64",
        "config": "str",
    },
}
"""Column types of each frame.

``samples`` has one row per window and distinct operator (``row`` is ``operator``) or collective
(``row`` is ``collective``, ``kind`` its name): ``time_s`` is the median over steps of the mean
within a step, ``spread_log`` the scaled median deviation of its logarithm over steps, ``count`` the
events, ``num_steps`` the steps, ``num_seen`` the ranks that recorded it, ``span`` the ranks from
the group's first to its last, ``num_nodes`` the nodes that it touches, 0 where not known.
``wait_s`` and ``transfer_s`` in ``skew`` add up to how long a rank stands still per step.
``skew.py`` tells of ``arrivals`` and ``links``, ``clocks.py`` of ``clocks``; ``ranks`` is
the small summary that every rank sends, per step.  ``traced.py`` tells of ``traced``.
``is_probe`` rows were measured between steps: their ``num_steps`` are repeats.
"""

KEYS: Mapping[str, tuple[str, ...]] = {
    "samples": (
        "run_id",
        "window",
        "row",
        "kind",
        "phase",
        "shape",
        "element_nbytes",
        "stage",
        "role",
        "num_ranks",
        "span",
        "num_nodes",
        "nbytes",
        "is_probe",
    ),
    "steps": ("run_id", "window", "rank", "step"),
    "phases": ("run_id", "window", "rank", "step", "name"),
    "skew": ("run_id", "window", "rank", "role", "collective"),
    "arrivals": ("run_id", "window", "rank", "role"),
    "clocks": ("run_id", "window", "rank"),
    "links": ("run_id", "window", "kind", "role", "num_ranks", "num_nodes", "nbytes", "ranks"),
    "ranks": ("run_id", "window", "rank"),
    "traced": ("run_id", "window", "kind", "phase", "shape", "element_nbytes", "stage"),
    "coverage": ("run_id", "window", "rank", "name"),
    "windows": ("run_id", "window", "rank"),
    "runs": ("run_id", "rank"),
}

_EMPTY: Mapping[str, Any] = {"str": "", "int64": 0, "float64": 0.0, "bool": False}


def normalise(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with exactly the columns and types of ``name``, one row per key, in key order.

    Of rows with equal keys the last stays; a missing column takes its empty value.
    """
    types = FRAMES[name]
    columns = {}
    for column, kind in types.items():
        if column in frame.columns:
            columns[column] = frame[column].astype(kind)  # type: ignore[call-overload]
        else:
            columns[column] = pd.Series(_EMPTY[kind], index=frame.index, dtype=kind)
    out = pd.DataFrame(columns, columns=list(types))
    keys = list(KEYS[name])
    out = out.drop_duplicates(subset=keys, keep="last").sort_values(keys, kind="stable")
    return out.reset_index(drop=True)


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as it stands in the table.

    >>> shape_text((256, 768)), shape_text(())
    ('256x768', '')
    """
    return "x".join(str(size) for size in shape)


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape that ``shape_text`` wrote.

    >>> parse_shape("256x768"), parse_shape("")
    ((256, 768), ())
    """
    return tuple(int(size) for size in text.split("x")) if text else ()
