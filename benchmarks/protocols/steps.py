"""Splits of a table of steps into calibrating and scored rows.

Rows of different machines never share a calibration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from forerun.benchmarks.protocols.scores import (
    LEAVE_ONE_OUT,
    PROTOCOLS,
    Fold,
    ScoredSteps,
    draw_held_out,
    machines,
    step_folds,
)
from forerun.calib.records.step_rows import StepRow

LEAVE_GROUP, LEAVE_FAMILY, LEAVE_WIDTH, LEAVE_DEPTH, LEAVE_RELEASE, SCALE_OUT, MORE_NODES = (
    "leave_group",
    "leave_family",
    "leave_width",
    "leave_depth",
    "leave_release",
    "scale_out",
    "more_nodes",
)
STEP_PROTOCOLS = {
    **PROTOCOLS["steps"],
    LEAVE_GROUP: "a machine with rows of two models, numbers of GPUs or batches or more",
    LEAVE_FAMILY: "a machine with rows of two pairs of tp and pp or more",
    LEAVE_WIDTH: "a machine with rows of two hidden sizes or more",
    LEAVE_DEPTH: "a machine with rows of one hidden size and two depths or more",
    LEAVE_RELEASE: "a machine with rows of two releases of its framework or more",
    SCALE_OUT: "a series (one model on one machine and stack) of two numbers of GPUs or more",
    MORE_NODES: "a series on two numbers of nodes or more, with ranks per node known",
}
"""In addition, ``calibrate_K`` and ``designed_K`` need a machine with more than K rows."""


class StepModel(Protocol):
    """A method to predict step times of layouts from those of others."""

    def fit(self, rows: Sequence[StepRow]) -> ScoredSteps:
        """Calibrate on rows of one machine; without rows, on priors alone."""
        ...


def series(rows: Sequence[StepRow], min_scales: int = 1) -> dict[str, list[int]]:
    """Return positions of the usable rows of series with at least ``min_scales`` GPU counts."""
    return {
        name: positions
        for name, positions in _positions(rows, series_name).items()
        if len({rows[i].num_ranks for i in positions}) >= min_scales
    }


def _positions(rows: Sequence[StepRow], key: Callable[[StepRow], str]) -> dict[str, list[int]]:
    positions: dict[str, list[int]] = {}
    for position, row in enumerate(rows):
        if not row.flag:
            positions.setdefault(key(row), []).append(position)
    return positions


def series_name(row: StepRow) -> str:
    """Return a name shared by rows of one model, precision, sequence length, machine and stack.

    Such rows differ in scale, batch and layout alone.  The name contains sizes besides the model's
    label, since tables cut layers and pad vocabularies.
    """
    config = row.config
    label = row.group.rpartition(f" x{row.num_ranks}")[0]
    parts = (row.machine, config.framework, label, row.width, f"L{config.model.num_layers}")
    return ", ".join((*parts, config.precision.value, config.fp8.value))


def named(rows: Sequence[StepRow], protocol: str) -> Iterator[Fold]:
    """Yield the folds of one of ``STEP_PROTOCOLS``; all are of one draw, since none is random."""
    if protocol == LEAVE_ONE_OUT:
        yield from step_folds(rows, None)
        return
    if protocol in _SCALES:
        yield from _from_the_least(rows, protocol)
        return
    for machine, positions in machines(rows).items():
        keys = {i: _KEYS[protocol](rows[i]) for i in positions}
        values = list(dict.fromkeys(keys.values()))
        for value in draw_held_out(machine, values) if len(values) > 1 else ():
            train = tuple(i for i in positions if keys[i] != value)
            yield Fold(protocol, machine, 0, positions, train)


_KEYS: dict[str, Callable[[StepRow], str]] = {
    LEAVE_GROUP: lambda row: row.group,
    LEAVE_FAMILY: lambda row: f"tp{row.config.parallelism.tp} pp{row.config.parallelism.pp}",
    LEAVE_WIDTH: lambda row: row.width,
    LEAVE_DEPTH: lambda row: f"{row.width} L{row.config.model.num_layers}",
    LEAVE_RELEASE: lambda row: row.config.framework,
}


def _num_nodes(row: StepRow) -> int | None:
    par = row.config.parallelism
    return math.ceil(par.num_ranks / par.ranks_per_node) if par.ranks_per_node else None


_SCALES: dict[str, Callable[[StepRow], int | None]] = {
    SCALE_OUT: lambda row: row.num_ranks,
    MORE_NODES: _num_nodes,
}
"""Scale that grows over a series; None if unknown."""


def _from_the_least(rows: Sequence[StepRow], protocol: str) -> Iterator[Fold]:
    """Yield folds in which the smallest scale of each series calibrates that series alone."""
    for positions in series(rows).values():
        scales = {i: _SCALES[protocol](rows[i]) for i in positions}
        known = {i: scale for i, scale in scales.items() if scale is not None}
        least = min(known.values(), default=0)
        train = tuple(i for i, scale in known.items() if scale == least)
        if len(train) < len(known):
            yield Fold(protocol, rows[positions[0]].machine, 0, list(known), train)
