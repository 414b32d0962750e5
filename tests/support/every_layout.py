"""Best layouts of a small space by exhaustive search: no bound, no dominance."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from forerun.calib.arguments.short_names import LayoutConstraint
from forerun.calib.memory.pipelines import needed_nbytes
from forerun.calib.search.cells import cells_of
from forerun.calib.search.results import MemoryBudget
from forerun.calib.search.space import num_nodes, recomputes, states
from forerun.calib.steps.model import FittedSteps
from forerun.calib.workload.config import RunConfig
from forerun.calib.workload.layout_table import LayoutTable


def variants_of(layout: RunConfig) -> Iterator[RunConfig]:
    """Yield a cell's layout with every sharding of the states and every choice of recompute."""
    for choice in states(layout, num_nodes(layout)):
        sharded = choice.of(layout)
        yield from (recompute.applied_to(sharded) for recompute in recomputes(layout))


@cache
def every_layout(config: RunConfig, num_ranks: int) -> tuple[RunConfig, ...]:
    """Return each split of the ranks with each sharding of states and each recompute."""
    cells = cells_of(config, num_ranks)
    splits = (cells.layout(place) for place in range(len(cells)))
    return tuple(one for split in splits for one in variants_of(split))


@cache
def _needed(config: RunConfig, num_ranks: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return bytes that each layout needs, and those of them outside tensors, ``(layouts,)``."""
    return needed_nbytes(LayoutTable.of(every_layout(config, num_ranks)))


_timed: dict[tuple[int, RunConfig, int], tuple[FittedSteps, list[float]]] = {}


def _times_s(config: RunConfig, steps: FittedSteps, num_ranks: int) -> list[float]:
    """Return each layout's time by this model; caching the model too keeps its id unique."""
    key = id(steps), config, num_ranks
    if key not in _timed:
        _timed[key] = steps, steps.median_times(every_layout(config, num_ranks)).tolist()
    return _timed[key][1]


def row(config: RunConfig) -> tuple[object, ...]:
    """Return the key by which layouts share a row of a plan."""
    par = config.parallelism
    degrees = (par.tp, par.cp, par.ep, par.expert_tp, par.pp, par.vp, par.dp)
    return (*degrees, config.batch.micro_batch_size, par.sharded)


def best_of_every(
    config: RunConfig,
    steps: FittedSteps,
    num_ranks: int,
    budget: MemoryBudget,
    top: int,
    keep: LayoutConstraint | None = None,
) -> list[tuple[float, RunConfig]]:
    """Return the fastest layout of each row that fits and is allowed, with its time, in order."""
    every = every_layout(config, num_ranks)
    fits = budget.holds(*_needed(config, num_ranks)).tolist()
    best: dict[tuple[object, ...], tuple[float, RunConfig]] = {}
    for layout, time_s, is_fitting in zip(
        every, _times_s(config, steps, num_ranks), fits, strict=True
    ):
        if not is_fitting or (keep is not None and not keep.allows(layout)):
            continue
        known = best.get(row(layout))
        if known is None or time_s < known[0] * (1 - 1e-9):
            best[row(layout)] = time_s, layout
    others = [pair for pair in best.values() if pair[1] != config]
    return sorted(others, key=lambda pair: pair[0])[:top]
