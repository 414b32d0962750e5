"""Groups of measured layouts of one job, and how good a layout somebody would choose among them.

A job is one model, batch and number of GPUs on one machine, release and precision, with all else
that no layout changes: kernels of attention, widths of gradients.  Layouts that were run several
times count once, with their median step; how far such runs lie apart tells which layouts nobody
could tell apart.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from forerun.calib.records.step_rows import StepKind, StepRow
from forerun.calib.regressors.choices import first_of_least
from forerun.calib.steps.known import same_layout
from forerun.calib.validation.steps import StepModel
from forerun.calib.workload.config import Batch, Parallelism, Recompute, RunConfig

_ALIKE_FRAC = 1e-6
"""Scores that differ by less are a tie: whoever chooses takes any of them."""

_ANY_VOCAB = 1 << 20

_Z_ONE_SIDED = 1.645
"""Of a normal distribution: a difference beyond is there in 95 of 100."""

Floats = NDArray[np.float64]
Scores = Callable[[Sequence[StepRow], Sequence[int]], Floats]
"""What somebody thinks of the layouts, the least is chosen; places of the known ones are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Layouts of one job, each with the median of its measured steps."""

    table: str
    name: str
    rows: tuple[StepRow, ...]
    num_runs: tuple[int, ...]
    """Of each layout."""
    sigma_log: float
    """Scatter of one run around its layout's mean; 0 where none was run twice."""

    @property
    def is_synthetic(self) -> bool:
        """Whether a simulator wrote the steps."""
        return {row.kind for row in self.rows} == {StepKind.SYNTHETIC}

    @property
    def times_s(self) -> Floats:
        """Measured, shape (layouts,)."""
        return np.array([row.measured_s for row in self.rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen once."""

    job: Job
    known: tuple[int, ...]
    time_ratio: float
    """Time of the chosen layout over that of the best; the mean where several are as good."""
    best_frac: float
    """1 where the best was chosen, 0 where another; between where one of several is the best."""
    apart_ratio: float
    """The same, where a layout counts as the best that is no slower than it by more than runs of
    one layout differ, at 95 %: what nobody repeated is always apart."""
    chosen: int
    weight: float
    """All choices of one job together weigh 1."""


def jobs(rows: Sequence[StepRow]) -> list[Job]:
    """Those of a table with two layouts or more, in the table's order; flagged rows are left."""
    found: dict[object, dict[object, list[StepRow]]] = {}
    for row in rows:
        config = row.config
        if row.flag or not row.measured_s > 0:
            continue
        key = (row.machine, row.group, row.num_ranks, _job_key(config))
        found.setdefault(key, {}).setdefault(same_layout(config), []).append(row)
    return [_job(list(layouts.values())) for layouts in found.values() if len(layouts) > 1]


def _job_key(config: RunConfig) -> object:
    """What no layout changes: the plan varies none of it."""
    return replace(
        same_layout(config),
        # Megatron pads the vocabulary to a multiple of TP.
        model=replace(config.model, vocab_size=_ANY_VOCAB),
        parallelism=Parallelism(engine=config.parallelism.engine),
        batch=Batch(micro_batch_size=1, global_batch_size=config.batch.global_batch_size),
        recompute=Recompute.NONE,
        recompute_num_layers=0,
        recompute_modules=(),
        distributes_saved_activations=False,
        offload_modules=(),
        optimizer_offload_frac=0.0,
        overlaps_optimizer_offload=False,
    )


def _job(layouts: Sequence[Sequence[StepRow]]) -> Job:
    rows = tuple(map(_merged, layouts))
    return Job(
        table=rows[0].table,
        name=rows[0].group,
        rows=rows,
        num_runs=tuple(map(len, layouts)),
        sigma_log=_scatter_log(layouts),
    )


def _scatter_log(layouts: Sequence[Sequence[StepRow]]) -> float:
    """Pooled over the layouts that were run more than once."""
    squares, degrees = 0.0, 0
    for runs in layouts:
        logs = np.log([row.measured_s for row in runs])
        squares += float(np.square(logs - logs.mean()).sum())
        degrees += len(runs) - 1
    return math.sqrt(squares / degrees) if degrees else 0.0


def _merged(rows: Sequence[StepRow]) -> StepRow:
    median = float(np.median([row.measured_s for row in rows]))
    return replace(rows[0], measured_s=median)


def known_places(job: Job, number: int, num_draws: int) -> Iterator[tuple[int, ...]]:
    """Which layouts were run before: each one in turn, or each set, or so many drawn sets.

    None where that would leave no layout to be found.
    """
    size = len(job.rows)
    if size <= number:
        return
    if number < 2 or math.comb(size, number) <= num_draws:
        yield from itertools.combinations(range(size), number)
        return
    seed = zlib.crc32(f"{job.table} {job.name} {size}".encode())
    generator = np.random.default_rng([seed, number])
    for _ in range(num_draws):
        yield tuple(sorted(generator.choice(size, size=number, replace=False).tolist()))


def choices(job: Job, known: Sequence[tuple[int, ...]], scores: Scores) -> list[Choice]:
    """One for each set of known layouts."""
    times_s, apart, found = job.times_s, _apart_ratios(job), []
    for places in known:
        said = scores(job.rows, places)
        least = float(said[first_of_least(said)])
        taken = said <= least + _ALIKE_FRAC * abs(least)
        ratios = times_s[taken] / times_s.min()
        found.append(
            Choice(
                job=job,
                known=places,
                time_ratio=float(ratios.mean()),
                best_frac=float(np.mean(ratios == 1.0)),
                apart_ratio=float(apart[taken].mean()),
                chosen=first_of_least(said),
                weight=1.0 / len(known),
            )
        )
    return found


def _apart_ratios(job: Job) -> Floats:
    ratios, runs = job.times_s / job.times_s.min(), np.array(job.num_runs)
    errors = job.sigma_log * np.sqrt(1 / runs + 1 / runs[job.times_s.argmin()])
    return np.where(np.log(ratios) > _Z_ONE_SIDED * errors, ratios, 1.0)


def by_model(model: StepModel) -> Scores:
    """Predicted steps; a known layout has the step that was measured, as in a plan."""

    def scores(rows: Sequence[StepRow], known: Sequence[int]) -> Floats:
        blind = [replace(row, measured_s=math.nan, measured_memory_nbytes=None) for row in rows]
        return np.asarray(model.fit([rows[at] for at in known]).predict(blind).time_s)

    return scores


def best_known(rows: Sequence[StepRow], known: Sequence[int]) -> Floats:
    """Whoever stays with the best layout that was run; a tie of all where none was."""
    found = np.full(len(rows), math.inf if known else 1.0, dtype=np.float64)
    for place in known:
        found[place] = rows[place].measured_s
    return found


def at_random(rows: Sequence[StepRow], known: Sequence[int]) -> Floats:
    """Any layout, drawn with the known ones as seed."""
    seed = zlib.crc32(" ".join(row.row_id for row in rows).encode())
    return np.random.default_rng([seed, *known]).permutation(len(rows)).astype(np.float64)


def choice_figures(found: Sequence[Choice]) -> Mapping[str, float]:
    """Median, 95th percentile and maximum of chosen over best, and the share of best ones.

    ``apart_p95`` counts a choice as the best where runs of one layout differ by as much.  Each job
    has the same weight, however many sets of known layouts it was asked with.
    """
    ratios = np.array([one.time_ratio for one in found])
    apart = np.array([one.apart_ratio for one in found])
    weights = np.array([one.weight for one in found])
    return {
        "jobs": len({id(one.job) for one in found}),
        "choices": len(found),
        "median": _quantile(ratios, weights, 0.5),
        "p95": _quantile(ratios, weights, 0.95),
        "apart_p95": _quantile(apart, weights, 0.95),
        "max": float(ratios.max()),
        "best_frac": float(np.average([one.best_frac for one in found], weights=weights)),
    }


def _quantile(values: Floats, weights: Floats, level: float) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    place = int(np.searchsorted(reached, level - 1e-9))
    return float(values[order[min(place, len(order) - 1)]])
