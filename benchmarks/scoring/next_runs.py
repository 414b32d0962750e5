"""Two layouts to run next, after the running one, and the choice once they are measured.

``informative_runs`` takes those that a plan recommends; it is compared with two random layouts and
with the two that the model, calibrated on the running one, predicts to be fastest.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from forerun.benchmarks.protocols.table_steps import TableSteps
from forerun.benchmarks.scoring.layout_choices import Choice, Job, by_model, choices
from forerun.calib.advice import Plan, compare
from forerun.calib.records import StepRow
from forerun.calib.steps import FittedSteps

NUM_NEXT = 2
FEWEST = 5
"""Fewest layouts of a job, so that two or more remain after two more runs."""
Picks = Callable[[FittedSteps, StepRow, Sequence[StepRow]], list[StepRow]]
"""Picks rows to run next, given a calibrated model, the running row and all others."""


def informative_runs(
    steps: FittedSteps, running: StepRow, others: Sequence[StepRow]
) -> list[StepRow]:
    """Return the layouts that a plan recommends."""
    running_candidate, *candidates = compare(
        running.config, [running.config, *(o.config for o in others)], steps
    )
    plan = Plan(
        running=running_candidate,
        measured_step_time_s=running.measured_s,
        memory_capacity_nbytes=None,
        candidates=tuple(candidates),
    )
    rows = {id(one): row for one, row in zip(candidates, others, strict=True)}
    return [rows[id(one)] for one in plan.worth_measuring][:NUM_NEXT]


def fastest(steps: FittedSteps, running: StepRow, others: Sequence[StepRow]) -> list[StepRow]:
    """Return the layouts that are predicted to be the fastest."""
    del running
    times_s = steps.predict([one.config for one in others]).time_s
    return [others[place] for place in np.argsort(times_s, kind="stable")[:NUM_NEXT]]


def drawn(steps: FittedSteps, running: StepRow, others: Sequence[StepRow]) -> list[StepRow]:
    """Return random layouts, the same in every run."""
    del steps
    names = " ".join([running.row_id, *(one.row_id for one in others)])
    generator = np.random.default_rng(zlib.crc32(names.encode()))
    places = generator.choice(len(others), size=NUM_NEXT, replace=False)
    return [others[place] for place in places.tolist()]


PICKS: Mapping[str, Picks] = {
    "named by the plan": informative_runs,
    "predicted fastest": fastest,
    "random": drawn,
}


def after_next_runs(job: Job, model: TableSteps, most_running: int) -> Iterator[tuple[str, Choice]]:
    """Yield the choice with the running layout alone, and after two more by each method.

    ``most_running`` layouts run in turn, evenly from the fastest to the slowest.
    """
    if len(job.rows) < FEWEST:
        return
    order = np.argsort(job.times_s, kind="stable")
    number = min(most_running, len(order))
    spread = np.unique(np.linspace(0, len(order) - 1, number).round().astype(int))
    known: dict[str, list[list[StepRow]]] = {"none": []}
    for running in (job.rows[place] for place in order[spread]):
        steps = model.fit([running]).steps(running)
        others = [row for row in job.rows if row is not running]
        known["none"].append([running])
        for name, pick in PICKS.items():
            known.setdefault(name, []).append([running, *pick(steps, running, others)])
    scores = by_model(model)
    for name, sets in known.items():
        yield from ((name, one) for one in choices(job, sets, scores))
