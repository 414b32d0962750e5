"""Which rows of a table of steps calibrate and which are scored.

Rows of different machines never share a calibration.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..records.step_rows import StepRow

MAX_SUBSETS = 256
"""All subsets of the calibration size are run where there are no more than these."""
LEAVE_ONE_OUT, LEAVE_GROUP, LEAVE_WIDTH, LEAVE_DEPTH, LEAVE_RELEASE, SCALE_OUT, MORE_NODES = (
    "leave_one_out",
    "leave_group",
    "leave_width",
    "leave_depth",
    "leave_release",
    "scale_out",
    "more_nodes",
)
STEP_PROTOCOLS = {
    LEAVE_ONE_OUT: "a machine with two rows or more",
    LEAVE_GROUP: "a machine with rows of two models, numbers of GPUs or batches or more",
    LEAVE_WIDTH: "a machine with rows of two hidden sizes or more",
    LEAVE_DEPTH: "a machine with rows of one hidden size and two depths or more",
    LEAVE_RELEASE: "a machine with rows of two releases of its framework or more",
    SCALE_OUT: "a series (one model on one machine and stack) of two numbers of GPUs or more",
    MORE_NODES: "a series on two numbers of nodes or more, with ranks per node known",
}
"""Besides these, ``calibrate_K`` needs a machine with more than K rows, as ``designed_K`` does."""
MAX_LEFT_OUT = 200
"""Rows of a machine that are left out one at a time, at most; drawn where there are more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Positions of the rows that calibrate and of those that are scored."""

    protocol: str
    machine: str
    draw: int
    train: tuple[int, ...]
    test: tuple[int, ...]


def machines(rows: Sequence[StepRow]) -> dict[str, list[int]]:
    """Positions of the usable rows of each machine, in the order of the table."""
    return _positions(rows, lambda row: row.machine)


def series(rows: Sequence[StepRow], min_scales: int = 1) -> dict[str, list[int]]:
    """Positions of the usable rows of each series of ``min_scales`` numbers of GPUs or more."""
    return {
        name: positions
        for name, positions in _positions(rows, series_name).items()
        if len({rows[i].num_ranks for i in positions}) >= min_scales
    }


def _positions(rows: Sequence[StepRow], key: Callable[[StepRow], str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for position, row in enumerate(rows):
        if not row.flag:
            found.setdefault(key(row), []).append(position)
    return found


def series_name(row: StepRow) -> str:
    """Equal for rows of one model, precision and sequence length on one machine and stack.

    They differ in scale, batch and layout alone.  Sizes stand beside the model's label, since
    tables cut layers and pad vocabularies.
    """
    config = row.config
    label = row.group.rpartition(f" x{row.num_ranks}")[0]
    parts = (row.machine, config.framework, label, row.width, f"L{config.model.num_layers}")
    return ", ".join((*parts, config.precision.value, config.fp8.value))


def calibrate_on(rows: Sequence[StepRow], num_rows: int, num_draws: int) -> Iterator[Fold]:
    """``num_rows`` random rows of each machine calibrate, the rest is scored.

    All subsets where they are few, else ``num_draws`` drawn with the machine's name and the draw as
    seed.  Without rows there is one fold.
    """
    name = f"calibrate_{num_rows}"
    for machine, positions in machines(rows).items():
        if len(positions) <= num_rows:
            continue
        for draw, train in enumerate(_subsets(machine, positions, num_rows, num_draws)):
            yield fold(name, machine, draw, positions, train)


def named(rows: Sequence[StepRow], protocol: str) -> Iterator[Fold]:
    """The folds of one of ``STEP_PROTOCOLS``; all are of one draw, since none is random."""
    if protocol in _SCALES:
        yield from _from_the_least(rows, protocol)
        return
    for machine, positions in machines(rows).items():
        keys = {i: str(i) for i in positions}
        if protocol != LEAVE_ONE_OUT:
            keys = {i: _KEYS[protocol](rows[i]) for i in positions}
        values = list(dict.fromkeys(keys.values()))
        if len(values) < 2:
            continue
        for value in _drawn(machine, values):
            train = [i for i in positions if keys[i] != value]
            yield fold(protocol, machine, 0, positions, train)


_KEYS: dict[str, Callable[[StepRow], str]] = {
    LEAVE_GROUP: lambda row: row.group,
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
"""What grows over a series; None where nobody knows."""


def _from_the_least(rows: Sequence[StepRow], protocol: str) -> Iterator[Fold]:
    """The smallest scale of each series calibrates that series alone."""
    for positions in series(rows).values():
        scales = {i: _SCALES[protocol](rows[i]) for i in positions}
        known = {i: scale for i, scale in scales.items() if scale is not None}
        least = min(known.values(), default=0)
        train = [i for i, scale in known.items() if scale == least]
        if len(train) < len(known):
            yield fold(protocol, rows[positions[0]].machine, 0, list(known), train)


def _subsets(
    machine: str, positions: Sequence[int], num_rows: int, num_draws: int
) -> Iterator[tuple[int, ...]]:
    if math.comb(len(positions), num_rows) <= MAX_SUBSETS:
        yield from itertools.combinations(positions, num_rows)
        return
    for draw in range(num_draws):
        generator = np.random.default_rng([zlib.crc32(machine.encode()), num_rows, draw])
        chosen = generator.choice(len(positions), size=num_rows, replace=False)
        yield tuple(positions[i] for i in sorted(chosen))


def _drawn(machine: str, values: Sequence[str]) -> Sequence[str]:
    if len(values) <= MAX_LEFT_OUT:
        return values
    generator = np.random.default_rng(zlib.crc32(machine.encode()))
    chosen = np.sort(generator.permutation(len(values))[:MAX_LEFT_OUT])
    return [values[int(i)] for i in chosen]


def fold(
    protocol: str, machine: str, draw: int, positions: Sequence[int], train: Sequence[int]
) -> Fold:
    """Of the rows at ``positions`` those in ``train`` calibrate, all others are scored."""
    chosen = frozenset(train)
    return Fold(
        protocol=protocol,
        machine=machine,
        draw=draw,
        train=tuple(train),
        test=tuple(i for i in positions if i not in chosen),
    )
