"""The best layouts of a small space by looking at every one of them: no bound, no dominance."""

from __future__ import annotations

from collections.abc import Iterator

from forerun.benchmarks.costs.plan import variants_of
from forerun.calib.arguments.keep import Keep
from forerun.calib.memory.layout_table import needed_nbytes
from forerun.calib.search.cells import cells_of
from forerun.calib.search.found import Room
from forerun.calib.steps.model import FittedSteps
from forerun.calib.workload.config import RunConfig


def every_layout(config: RunConfig, num_ranks: int) -> Iterator[RunConfig]:
    """Each split of the ranks with each way to keep states and all that may be computed again."""
    cells = cells_of(config, num_ranks)
    for place in range(len(cells)):
        yield from variants_of(cells.layout(place))


def row(config: RunConfig) -> tuple[object, ...]:
    """What makes two layouts one row of a plan."""
    par = config.parallelism
    degrees = (par.tp, par.cp, par.ep, par.expert_tp, par.pp, par.vp, par.dp)
    return (*degrees, config.batch.micro_batch_size, par.sharded)


def best_of_every(
    config: RunConfig,
    steps: FittedSteps,
    num_ranks: int,
    room: Room,
    top: int,
    keep: Keep | None = None,
) -> list[tuple[float, RunConfig]]:
    """The fastest of each row that fits and is asked for, fastest first, with its step time."""
    layouts = [one for one in every_layout(config, num_ranks) if keep is None or keep.allows(one)]
    fits = room.holds(*needed_nbytes(layouts)).tolist()
    able = [one for one, is_held in zip(layouts, fits, strict=True) if is_held]
    best: dict[tuple[object, ...], tuple[float, RunConfig]] = {}
    for time_s, layout in zip(steps.median_times(able).tolist(), able, strict=True):
        known = best.get(row(layout))
        if known is None or time_s < known[0] * (1 - 1e-9):
            best[row(layout)] = time_s, layout
    others = [pair for pair in best.values() if pair[1] != config]
    return sorted(others, key=lambda pair: pair[0])[:top]
