"""Groups of measured layouts of one job, and the quality of a choice among them.

A job is one model, batch and number of GPUs on one machine, release and precision, with everything
else that no layout changes: kernels of attention, widths of gradients.  Layouts that were run
several times count once, with their median step; the scatter of such runs gives the layouts that
are indistinguishable.
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

from forerun.benchmarks.protocols.scores import ScoredSteps
from forerun.benchmarks.protocols.steps import StepModel
from forerun.benchmarks.scoring.step_comparisons import mean_interval
from forerun.calib.records import StepKind, StepRow
from forerun.calib.regressors import first_minimum
from forerun.calib.steps import same_layout
from forerun.calib.workload import Batch, Parallelism, Recompute, RunConfig

_ALIKE_FRAC = 1e-6
"""Scores that differ by less are a tie, and any of them may be chosen."""

_ANY_VOCAB = 1 << 20

_Z_ONE_SIDED = 1.645
"""Quantile of a normal distribution: a larger difference is real in 95 of 100 cases."""

Floats = NDArray[np.float64]
Scores = Callable[[Sequence[StepRow], Sequence[StepRow]], Floats]
"""Scores layouts, least is best; the second argument is rows measured before, which may be of these
layouts or of other jobs of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Layouts of one job, each with the median of its measured steps."""

    table: str
    name: str
    rows: tuple[StepRow, ...]
    num_runs: tuple[int, ...]
    """Number of runs of each layout."""
    sigma_log: float
    """Scatter of one run around its layout's mean; 0 if none was run twice."""

    @property
    def is_synthetic(self) -> bool:
        """True if a simulator wrote the steps."""
        return {row.kind for row in self.rows} == {StepKind.SYNTHETIC}

    @property
    def times_s(self) -> Floats:
        """Measured seconds, shape (layouts,)."""
        return np.array([row.measured_s for row in self.rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice."""

    job: Job
    time_ratio: float
    """Time of the chosen layout over that of the best; the mean over tied choices."""
    best_frac: float
    """1 if the best was chosen, 0 if another; in between if one of several tied choices is the
    best."""
    apart_ratio: float
    """``time_ratio``, but a layout counts as the best if it is slower by no more than runs of one
    layout differ, at 95 %; without repeats every difference counts."""
    tau: float
    """Kendall's tau-b of scores and times over the layouts that were not known; NaN if these are
    fewer than two, 0 if all scores are equal."""
    chosen: int
    weight: float
    """Weight of the choice; all choices of one job sum to 1."""


def jobs(rows: Sequence[StepRow]) -> list[Job]:
    """Return a table's jobs with two layouts or more, in order; flagged rows are skipped."""
    layouts_by_job: dict[object, dict[object, list[StepRow]]] = {}
    for row in rows:
        config = row.config
        if row.flag or not row.measured_s > 0:
            continue
        key = (row.machine, row.group, row.num_ranks, _job_key(config))
        layouts_by_job.setdefault(key, {}).setdefault(same_layout(config), []).append(row)
    return [_job(list(layouts.values())) for layouts in layouts_by_job.values() if len(layouts) > 1]


def _job_key(config: RunConfig) -> object:
    """Return everything that no layout changes, and that the plan does not vary."""
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
    """Return the scatter pooled over the layouts that were run more than once."""
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
    """Yield known layouts of the job: each, each set of ``number``, or ``num_draws`` random sets.

    Yields nothing if no layout would remain to be chosen.
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
    """Yield random sets of layouts of the machine's other jobs; one of all if there are no more."""
    machine = job.rows[0].machine
    others = [one for one in here if one is not job and one.rows[0].machine == machine]
    pool = [row for one in others for row in one.rows]
    yield from _drawn_sets(pool, number, num_draws, f"{job.table} {job.name}")


def rows_of_one_size(job: Job, here: Sequence[Job], most: int) -> Iterator[tuple[StepRow, ...]]:
    """Yield layouts of each other model size on the machine, at most ``most`` random ones each."""
    job_row = job.rows[0]
    pools: dict[tuple[str, int], list[StepRow]] = {}
    for one in here:
        first = one.rows[0]
        if first.machine == job_row.machine and _size(first) != _size(job_row):
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
    """Return one choice for each set of known layouts."""
    times_s, apart, results = job.times_s, _apart_ratios(job), []
    for rows in known:
        predicted = scores(job.rows, rows)
        least = float(predicted[first_minimum(predicted)])
        taken = predicted <= least + _ALIKE_FRAC * abs(least)
        ratios = times_s[taken] / times_s.min()
        known_ids = {row.row_id for row in rows}
        is_open = np.array([row.row_id not in known_ids for row in job.rows])
        results.append(
            Choice(
                job=job,
                time_ratio=float(ratios.mean()),
                best_frac=float(np.mean(ratios == 1.0)),
                apart_ratio=float(apart[taken].mean()),
                tau=rank_correlation(predicted[is_open], times_s[is_open]),
                chosen=first_minimum(predicted),
                weight=1.0 / len(known),
            )
        )
    return results


def rank_correlation(predicted: Floats, times_s: Floats) -> float:
    """Return Kendall's tau-b; NaN for fewer than two values, 0 if all are tied.

    >>> rank_correlation(np.array([3.0, 2.0, 1.0]), np.array([1.0, 2.0, 3.0]))
    -1.0
    """
    if len(predicted) < 2:
        return math.nan
    tau = float(np.asarray(kendalltau(predicted, times_s))[0])
    return tau if math.isfinite(tau) else 0.0


def _apart_ratios(job: Job) -> Floats:
    ratios, runs = job.times_s / job.times_s.min(), np.array(job.num_runs)
    errors = job.sigma_log * np.sqrt(1 / runs + 1 / runs[job.times_s.argmin()])
    return np.where(np.log(ratios) > _Z_ONE_SIDED * errors, ratios, 1.0)


def by_model(model: StepModel) -> Scores:
    """Return scores of predicted steps; a known layout has its measured step, as in a plan."""
    fits: dict[tuple[str, ...], ScoredSteps] = {}

    def scores(rows: Sequence[StepRow], known: Sequence[StepRow]) -> Floats:
        blind = [replace(row, measured_s=math.nan, measured_memory_nbytes=None) for row in rows]
        key = tuple(f"{row.machine} {row.row_id}" for row in known)
        if key not in fits:
            fits[key] = model.fit(known)
        predicted = np.array(fits[key].predict(blind).time_s)
        return _with_measured(predicted, rows, known)

    return scores


def _with_measured(predicted: Floats, rows: Sequence[StepRow], known: Sequence[StepRow]) -> Floats:
    measured = {row.row_id: row.measured_s for row in known}
    return np.array(
        [measured.get(row.row_id, one) for row, one in zip(rows, predicted, strict=True)]
    )


def best_known(rows: Sequence[StepRow], known: Sequence[StepRow]) -> Floats:
    """Score by staying with the best known layout; all tie if none is known."""
    return _with_measured(np.full(len(rows), math.inf if known else 1.0), rows, known)


def choice_figures(choice_rows: Sequence[Choice]) -> Mapping[str, float]:
    """Return mean, median, 95th percentile and maximum of chosen over best minus 1 (regret), mean
    tau, and the share of best choices.

    ``apart_p95_frac`` counts a choice as the best if runs of one layout differ by as much.  Each
    job has the same weight, regardless of its number of sets of known layouts.
    """
    regrets = np.array([one.time_ratio for one in choice_rows]) - 1
    apart = np.array([one.apart_ratio for one in choice_rows]) - 1
    weights = np.array([one.weight for one in choice_rows])
    taus = np.array([*job_means(choice_rows, "tau").values()])
    return {
        "jobs": len({id(one.job) for one in choice_rows}),
        "choices": len(choice_rows),
        "mean_frac": float(np.average(regrets, weights=weights)),
        "median_frac": _quantile(regrets, weights, 0.5),
        "p95_frac": _quantile(regrets, weights, 0.95),
        "apart_p95_frac": _quantile(apart, weights, 0.95),
        "max_frac": float(regrets.max()),
        "tau": float(taus.mean()) if len(taus) else math.nan,
        "best_frac": float(np.average([one.best_frac for one in choice_rows], weights=weights)),
    }


def job_means(choice_rows: Sequence[Choice], name: str) -> dict[int, float]:
    """Return each job's mean of a field of its choices, by the job's ``id``; NaN is skipped."""
    of_jobs: dict[int, list[float]] = {}
    for one in choice_rows:
        if math.isfinite(value := getattr(one, name)):
            of_jobs.setdefault(id(one.job), []).append(value)
    return {job: float(np.mean(values)) for job, values in of_jobs.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Ours minus the better of some others, with its 90 % interval over jobs."""

    other: str
    mean: float
    low: float
    high: float


def against_the_better(
    ours: Sequence[Choice], others: Mapping[str, Sequence[Choice]], name: str
) -> Difference | None:
    """Compare a field of the choices, paired by job; None if there is nothing to compare.

    The better is the one of greater mean tau, or of smaller mean of any other field.
    """
    our_means, sign = job_means(ours, name), -1.0 if name == "tau" else 1.0
    means = {other: job_means(their_choices, name) for other, their_choices in others.items()}
    able = {
        other: their_choices
        for other, their_choices in means.items()
        if their_choices.keys() & our_means.keys()
    }
    if not able:
        return None
    best = min(able, key=lambda other: sign * float(np.mean([*able[other].values()])))
    differences = [our_means[job] - value for job, value in able[best].items() if job in our_means]
    low, high = mean_interval(np.array(differences), np.ones(len(differences)))
    return Difference(other=best, mean=float(np.mean(differences)), low=low, high=high)


def _quantile(values: Floats, weights: Floats, level: float) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    place = int(np.searchsorted(reached, level - 1e-9))
    return float(values[order[min(place, len(order) - 1)]])
