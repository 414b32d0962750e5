"""Score the folds of the acceptance table, each once, in one process or in several.

Folds are independent, so that any number of processes gives the same figures.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
from threadpoolctl import threadpool_limits

from forerun.benchmarks.baselines.steps import BASELINES
from forerun.benchmarks.protocols.scores import Fold, score_folds
from forerun.benchmarks.protocols.steps import MORE_NODES, SCALE_OUT, StepModel
from forerun.benchmarks.protocols.table_steps import TableSteps, design
from forerun.benchmarks.published.readers import model_over, steps_of
from forerun.benchmarks.scoring.step_acceptance import CLAIMS, Claim
from forerun.calib.records.step_rows import StepRow

MODELS = (TableSteps.name, *(baseline.name for baseline in BASELINES))
_BASELINES: dict[str, StepModel] = {baseline.name: baseline for baseline in BASELINES}
_PARTS_PER_JOB = 8
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Predictions of one model for the folds of a claim, or for some of them."""

    folds: tuple[pd.DataFrame, ...]
    seconds: float
    """Processor time."""

    def of(self, is_scored: Callable[[StepRow], bool] | None) -> list[pd.DataFrame]:
        """Return the scored rows; folds without any are left out."""
        if is_scored is None:
            return list(self.folds)
        cut = [fold[fold["row"].map(is_scored)] for fold in self.folds]
        return [fold for fold in cut if len(fold)]


def score(
    data: Path, claims: Sequence[Claim], chosen: str, num_draws: int, num_jobs: int
) -> dict[tuple[Key, str], Scored]:
    """Return predictions of ``chosen`` and the baselines for the folds of each claim's key."""
    names = dict.fromkeys((chosen, *MODELS[1:]))
    tasks: list[_Task] = []
    for claim in {claim.key: claim for claim in reversed(claims)}.values():
        folds = _folds(data, claim, num_draws)
        for name in names:
            parts = _PARTS_PER_JOB * num_jobs if name == MODELS[0] and num_jobs > 1 else 1
            place = CLAIMS.index(claim)
            tasks += [
                _Task(data=data, place=place, model=name, folds=tuple(folds[part::parts]))
                for part in range(min(parts, max(1, len(folds))))
            ]
    parts_by_key: dict[tuple[Key, str], list[Scored]] = {}
    for task, done in _each(tasks, num_jobs):
        parts_by_key.setdefault((CLAIMS[task.place].key, task.model), []).append(done)
    return {key: _joined(parts) for key, parts in parts_by_key.items()}


def claim_rows(data: Path, claim: Claim) -> list[StepRow]:
    """Return the rows that the positions in a claim's folds refer to."""
    return claim.usable(steps_of(data, claim.table).rows)


def count_excluded(data: Path, claim: Claim, num_draws: int) -> tuple[int, Counter[str]]:
    """Return the number of rows of the table, and of those in no fold, by the first reason."""
    table, rows = steps_of(data, claim.table), claim_rows(data, claim)
    used = {place for fold in _folds(data, claim, num_draws) for place in (*fold.train, *fold.test)}
    known = {(rows[place].machine, rows[place].row_id) for place in used}
    reasons = Counter(_first_reason(skip.reason) for skip in table.skipped)
    too_few = {
        SCALE_OUT: f"a series of fewer than {claim.min_scales} numbers of GPUs",
        MORE_NODES: "a series on one number of nodes, or on a number that is not stated",
    }
    for row in table.rows:
        if (row.machine, row.row_id) in known:
            continue
        if row.flag:
            reasons[_first_reason(row.flag)] += 1
        elif not claim.usable([row]) and claim.machine:
            reasons["another machine"] += 1
        else:
            reasons[too_few.get(claim.protocol, "a machine of too few rows")] += 1
    return len(table.rows) + len(table.skipped), reasons


@lru_cache(maxsize=64)
def _folds(data: Path, claim: Claim, num_draws: int) -> list[Fold]:
    return claim.folds(claim_rows(data, claim), num_draws, design)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    data: Path
    place: int
    """Index of the claim."""
    model: str
    folds: tuple[Fold, ...]


def _each(tasks: Sequence[_Task], num_jobs: int) -> Iterator[tuple[_Task, Scored]]:
    """Yield each task with its result, in order."""
    if num_jobs == 1:
        yield from ((task, _log_task(task, _run(task))) for task in tasks)
        return
    with ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn")) as pool:
        for task, done in zip(tasks, pool.map(_run, tasks), strict=True):
            yield task, _log_task(task, done)


def _run(task: _Task) -> Scored:
    claim = CLAIMS[task.place]
    begin = time.process_time()
    with threadpool_limits(1):
        model = _BASELINES.get(task.model) or model_over(task.data, claim.operators)
        folds = score_folds(claim_rows(task.data, claim), task.folds, model.fit)
    return Scored(folds=tuple(folds), seconds=time.process_time() - begin)


def _log_task(task: _Task, done: Scored) -> Scored:
    claim = CLAIMS[task.place]
    if task.model not in MODELS[1:]:
        message = f"{claim.title}, {claim.protocol}, {len(task.folds)} folds: {done.seconds:.0f} s"
        print(message, file=sys.stderr, flush=True)
    return done


def _joined(parts: Sequence[Scored]) -> Scored:
    """Merge parts, each of which had every n-th fold, in the original order."""
    number, total = len(parts), sum(len(part.folds) for part in parts)
    folds = tuple(parts[place % number].folds[place // number] for place in range(total))
    return Scored(folds=folds, seconds=sum(part.seconds for part in parts))


def _first_reason(text: str) -> str:
    """Drop the quoted value, so that rows excluded for one reason are counted together.

    >>> _first_reason("accelerator 'TPU-v5e' is not NVIDIA's; only its stack is known")
    "accelerator is not NVIDIA's"
    """
    return re.sub(r" '[^']*'", "", text.partition(";")[0])
