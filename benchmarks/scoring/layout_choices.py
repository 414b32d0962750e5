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
from scipy.stats import kendalltau

from forerun.benchmarks.protocols.steps import StepModel
from forerun.benchmarks.scoring.step_comparisons import mean_interval
from forerun.calib.records import StepKind, StepRow
from forerun.calib.regressors import first_of_least
from forerun.calib.steps import same_layout
from forerun.calib.validation import ScoredSteps
from forerun.calib.workload import Batch, Parallelism, Recompute, RunConfig

_ALIKE_FRAC = 1e-6
"""Scores that differ by less are a tie: whoever chooses takes any of them."""

_ANY_VOCAB = 1 << 20

_Z_ONE_SIDED = 1.645
"""Of a normal distribution: a difference beyond is there in 95 of 100."""

Floats = NDArray[np.float64]
Scores = Callable[[Sequence[StepRow], Sequence[StepRow]], Floats]
"""What somebody thinks of the layouts, the least is chosen; rows that were measured before are
given, which may be of these layouts or of other jobs of the machine."""


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
    time_ratio: float
    """Time of the chosen layout over that of the best; the mean where several are as good."""
    best_frac: float
    """1 where the best was chosen, 0 where another; between where one of several is the best."""
    apart_ratio: float
    """The same, where a layout counts as the best that is no slower than it by more than runs of
    one layout differ, at 95 %: what nobody repeated is always apart."""
    tau: float
    """Kendall's tau-b of scores and times over the layouts that were not known; NaN where these are
    fewer than two, 0 where all scores are equal."""
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


def known_rows(job: Job, number: int, num_draws: int) -> Iterator[tuple[StepRow, ...]]:
    """Layouts of the job that were run before: each in turn, or each set, or so many drawn sets.

    None where that would leave no layout to be found.
    """
    size = len(job.rows)
    if size <= number:
        return
    if number < 2 or math.comb(size, number) <= num_draws:
        yield from itertools.combinations(job.rows, number)
        return
    seed = zlib.crc32(f"{job.table} {job.name} {size}".encode())
    generator = np.random.default_rng([seed, number])
    for _ in range(num_draws):
        places = sorted(generator.choice(size, size=number, replace=False).tolist())
        yield tuple(job.rows[place] for place in places)


def rows_of_other_jobs(
    job: Job, here: Sequence[Job], number: int, num_draws: int
) -> Iterator[tuple[StepRow, ...]]:
    """Drawn sets of layouts of the machine's other jobs; all of them where they are no more."""
    machine = job.rows[0].machine
    others = [one for one in here if one is not job and one.rows[0].machine == machine]
    pool = [row for one in others for row in one.rows]
    yield from _drawn_sets(pool, number, num_draws, f"{job.table} {job.name}")


def rows_of_one_size(job: Job, here: Sequence[Job], most: int) -> Iterator[tuple[StepRow, ...]]:
    """Layouts of each other size of model on the machine, ``most`` of them drawn."""
    own = job.rows[0]
    pools: dict[tuple[str, int], list[StepRow]] = {}
    for one in here:
        first = one.rows[0]
        if first.machine == own.machine and _size(first) != _size(own):
            pools.setdefault(_size(first), []).extend(one.rows)
    for size, pool in pools.items():
        yield from _drawn_sets(pool, most, 1, f"{job.table} {size}")


def _size(row: StepRow) -> tuple[str, int]:
    return row.width, row.config.model.num_layers


def _drawn_sets(
    pool: Sequence[StepRow], number: int, num_draws: int, name: str
) -> Iterator[tuple[StepRow, ...]]:
    if len(pool) <= number:
        yield from [tuple(pool)] if pool else []
        return
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    for _ in range(num_draws):
        places = generator.choice(len(pool), size=number, replace=False)
        yield tuple(pool[place] for place in sorted(places.tolist()))


def choices(job: Job, known: Sequence[Sequence[StepRow]], scores: Scores) -> list[Choice]:
    """One for each set of known layouts."""
    times_s, apart, found = job.times_s, _apart_ratios(job), []
    for rows in known:
        said = scores(job.rows, rows)
        least = float(said[first_of_least(said)])
        taken = said <= least + _ALIKE_FRAC * abs(least)
        ratios = times_s[taken] / times_s.min()
        told = {row.row_id for row in rows}
        is_open = np.array([row.row_id not in told for row in job.rows])
        found.append(
            Choice(
                job=job,
                time_ratio=float(ratios.mean()),
                best_frac=float(np.mean(ratios == 1.0)),
                apart_ratio=float(apart[taken].mean()),
                tau=rank_correlation(said[is_open], times_s[is_open]),
                chosen=first_of_least(said),
                weight=1.0 / len(known),
            )
        )
    return found


def rank_correlation(said: Floats, times_s: Floats) -> float:
    """Kendall's tau-b; NaN of fewer than two, 0 where nothing is told apart.

    >>> rank_correlation(np.array([3.0, 2.0, 1.0]), np.array([1.0, 2.0, 3.0]))
    -1.0
    """
    if len(said) < 2:
        return math.nan
    found = float(np.asarray(kendalltau(said, times_s))[0])
    return found if math.isfinite(found) else 0.0


def _apart_ratios(job: Job) -> Floats:
    ratios, runs = job.times_s / job.times_s.min(), np.array(job.num_runs)
    errors = job.sigma_log * np.sqrt(1 / runs + 1 / runs[job.times_s.argmin()])
    return np.where(np.log(ratios) > _Z_ONE_SIDED * errors, ratios, 1.0)


def by_model(model: StepModel) -> Scores:
    """Predicted steps; a known layout has the step that was measured, as in a plan."""
    fits: dict[tuple[str, ...], ScoredSteps] = {}

    def scores(rows: Sequence[StepRow], known: Sequence[StepRow]) -> Floats:
        blind = [replace(row, measured_s=math.nan, measured_memory_nbytes=None) for row in rows]
        key = tuple(f"{row.machine} {row.row_id}" for row in known)
        if key not in fits:
            fits[key] = model.fit(known)
        said = np.array(fits[key].predict(blind).time_s)
        return _with_measured(said, rows, known)

    return scores


def _with_measured(said: Floats, rows: Sequence[StepRow], known: Sequence[StepRow]) -> Floats:
    measured = {row.row_id: row.measured_s for row in known}
    return np.array([measured.get(row.row_id, one) for row, one in zip(rows, said, strict=True)])


def best_known(rows: Sequence[StepRow], known: Sequence[StepRow]) -> Floats:
    """Whoever stays with the best layout that was run; a tie of all where none was."""
    return _with_measured(np.full(len(rows), math.inf if known else 1.0), rows, known)


def choice_figures(found: Sequence[Choice]) -> Mapping[str, float]:
    """Mean, median, 95th percentile and maximum of chosen over best less 1 (regret), mean tau, and
    the share of best ones.

    ``apart_p95_frac`` counts a choice as the best where runs of one layout differ by as much.  Each
    job has the same weight, however many sets of known layouts it was asked with.
    """
    regrets = np.array([one.time_ratio for one in found]) - 1
    apart = np.array([one.apart_ratio for one in found]) - 1
    weights = np.array([one.weight for one in found])
    taus = np.array([*job_means(found, "tau").values()])
    return {
        "jobs": len({id(one.job) for one in found}),
        "choices": len(found),
        "mean_frac": float(np.average(regrets, weights=weights)),
        "median_frac": _quantile(regrets, weights, 0.5),
        "p95_frac": _quantile(regrets, weights, 0.95),
        "apart_p95_frac": _quantile(apart, weights, 0.95),
        "max_frac": float(regrets.max()),
        "tau": float(taus.mean()) if len(taus) else math.nan,
        "best_frac": float(np.average([one.best_frac for one in found], weights=weights)),
    }


def job_means(found: Sequence[Choice], name: str) -> dict[int, float]:
    """Mean of a field of the choices of each job, by the job's place; jobs without one are left."""
    of_jobs: dict[int, list[float]] = {}
    for one in found:
        if math.isfinite(value := getattr(one, name)):
            of_jobs.setdefault(id(one.job), []).append(value)
    return {job: float(np.mean(values)) for job, values in of_jobs.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Ours less the better of some others, with its 90 % interval over jobs."""

    other: str
    mean: float
    low: float
    high: float


def against_the_better(
    ours: Sequence[Choice], others: Mapping[str, Sequence[Choice]], name: str
) -> Difference | None:
    """In a field of the choices, paired by job; None where there is nothing to compare.

    The better has the greater mean tau, or the smaller mean of anything else.
    """
    own, sign = job_means(ours, name), -1.0 if name == "tau" else 1.0
    means = {other: job_means(found, name) for other, found in others.items()}
    able = {other: found for other, found in means.items() if found.keys() & own.keys()}
    if not able:
        return None
    best = min(able, key=lambda other: sign * float(np.mean([*able[other].values()])))
    differences = [own[job] - value for job, value in able[best].items() if job in own]
    low, high = mean_interval(np.array(differences), np.ones(len(differences)))
    return Difference(other=best, mean=float(np.mean(differences)), low=low, high=high)


def _quantile(values: Floats, weights: Floats, level: float) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    place = int(np.searchsorted(reached, level - 1e-9))
    return float(values[order[min(place, len(order) - 1)]])
