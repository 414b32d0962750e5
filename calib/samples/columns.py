"""The frames of a sample table: their columns, types and keys."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

# Increased if a reader of the old files would misread the new ones.
TABLE_SCHEMA = 1

TEXTS = frozenset(("run_id", "row", "kind", "phase", "shape", "role", "ranks", "flags", "name"))
TEXTS |= {"collective", "device", "created_by", "config", "cluster", "loop"}
"""Columns of text."""
_COLUMNS = {
    "samples": """
        *run_id *window *row *kind *phase *shape *element_nbytes *stage *role *num_ranks *span
        *num_nodes *nbytes is_bound time_s count num_steps num_seen spread_log host_bound_frac
        host_s host_spread_log *is_probe
    """,
    "steps": "*run_id *window *rank *step time_s gap_s hook_s added_s is_hooked is_clean flags",
    "phases": "*run_id *window *rank *step *name count time_s wait_s hook_s",
    "skew": "*run_id *window *rank *role *collective wait_s transfer_s num_steps",
    "arrivals": "*run_id *window *rank *role num_events num_last late_s num_steps",
    "clocks": """
        *run_id *window *rank reference offset_s low_s high_s drift_frac num_moments num_dropped
        is_reached is_shared
    """,
    "links": """
        *run_id *window *kind *role *num_ranks *num_nodes *nbytes *ranks time_s exposed_s count
        num_steps spread_log
    """,
    "ranks": """
        *run_id *window *rank num_steps step_s forward_s backward_s optimizer_s wait_s routed_rows
    """,
    "traced": "*run_id *window *kind *phase *shape *element_nbytes *stage time_s count num_kernels",
    "routing": "*run_id *window *rank *layer ranks num_rows num_most num_passes",
    "loads": """
        *run_id *window *stage *num_ranks num_rows num_most num_fullest num_microbatches
    """,
    "coverage": "*run_id *window *rank *name installed fired",
    "windows": """
        *run_id *window *rank first_step last_step num_faults num_dropped memory_peak_nbytes
        device_memory_nbytes
    """,
    "runs": """
        *run_id *rank world_size stage tp_rank dp_rank device created_by started_unix_s config
        cluster loop
    """,
}
"""Columns of each frame; those of its key have a star."""


def _type(column: str) -> str:
    """Return the type of a column by its name: units are floats, predicates booleans, and all but
    the texts counts."""
    if column in TEXTS:
        return "str"
    if column.endswith(("_s", "_log", "_frac")):
        return "float64"
    return "bool" if column.startswith("is_") else "int64"


FRAMES: Mapping[str, Mapping[str, str]] = {
    name: {column.lstrip("*"): _type(column.lstrip("*")) for column in text.split()}
    for name, text in _COLUMNS.items()
}
"""Column types of each frame.

``samples`` has one row per window and distinct operator (``row`` is ``operator``) or collective
(``row`` is ``collective``, ``kind`` its name): ``time_s`` is the median over steps of the mean
within a step, ``spread_log`` the scaled median deviation of its logarithm over steps, ``count`` the
events, ``num_steps`` the steps, ``num_seen`` the ranks that recorded it, ``span`` the ranks from
the group's first to its last, ``num_nodes`` the nodes that it touches, 0 if unknown.
``host_bound_frac`` is the share of an operator's time in which a device waited for the host,
``host_s`` the host's time to launch it if nothing blocked it, and ``host_spread_log`` the deviation
of that over steps, by the median within a step; 0 if unknown, as on a CPU.
``added_s`` is what recording a step's operators has added to it, 0 if unknown.
``wait_s`` and ``transfer_s`` in ``skew`` add up to the time that a rank stands still per step.
``clocks.py`` documents ``clocks``, ``arrivals`` and ``links``, ``operator_rows.py`` ``traced``,
``routing.py`` ``routing`` and ``loads``; ``ranks`` is the small summary that every rank sends, per
step.  ``is_probe`` rows were measured between steps: their ``num_steps`` are repeats, and their
``spread_log`` includes the error of correcting them by controls (``operator_rows.py``).
"""

KEYS: Mapping[str, tuple[str, ...]] = {
    name: tuple(column[1:] for column in text.split() if column[0] == "*")
    for name, text in _COLUMNS.items()
}

_EMPTY = {"str": "", "int64": 0, "float64": 0.0, "bool": False}


def normalise(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with exactly the columns and types of ``name``, one row per key, in key
    order.

    The last of rows with equal keys is kept; a missing column gets its empty value.
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
    """Return a shape as text, as it is written to the table.

    >>> shape_text((256, 768)), shape_text(())
    ('256x768', '')
    """
    return "x".join(str(size) for size in shape)


def parse_shape(text: str) -> tuple[int, ...]:
    """Return the shape that ``shape_text`` wrote.

    >>> parse_shape("256x768"), parse_shape("")
    ((256, 768), ())
    """
    return tuple(int(size) for size in text.split("x")) if text else ()
