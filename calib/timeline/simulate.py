"""Exact earliest-start times of a pipeline schedule, for many layouts at once or one in full.

Where both ends of a message block, as in Megatron's batched point-to-point, an exchange starts when
both stages have arrived and holds both until it ends.  Other messages occupy their link, and hold
only the stage that waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .bulk import stage_ends
from .costs import PipelineCosts, cost_tables, least_makespans
from .graph import TaskEvent, event_graph
from .programs import Pipeline, TaskKind

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Times in seconds, shape (stages, alternatives), from the start of the step."""

    end_s: Floats
    """When a stage has finished its last task."""
    compute_s: Floats
    transfer_s: Floats
    """Held by messages that it posts and waits for at once, without the wait for the other end; of
    several in one call, the longest.  Others can hide; what does not, a stage idles."""

    @property
    def makespan_s(self) -> Floats:
        """When the last stage to finish has finished, shape (alternatives,)."""
        return self.end_s.max(axis=0)

    def columns(self, begin: int, end: int) -> Simulation:
        """The alternatives from ``begin`` up to ``end``."""
        part = slice(begin, end)
        return Simulation(
            end_s=self.end_s[:, part],
            compute_s=self.compute_s[:, part],
            transfer_s=self.transfer_s[:, part],
        )


class Span(NamedTuple):
    """One task of one stage in the simulated step."""

    stage: int
    """An exchange has a span on each of its stages, a transfer one on the stage that sends."""
    kind: TaskKind
    chunk: int
    """Of a message, the chunk above the boundary that it crosses."""
    microbatch: int
    start_s: float
    end_s: float

    def scaled(self, factor: float) -> Span:
        """The same in a step that takes ``factor`` times as long."""
        return self._replace(start_s=factor * self.start_s, end_s=factor * self.end_s)


def simulate(costs: PipelineCosts, pipeline: Pipeline | int) -> Simulation:
    """Earliest-start times of all alternatives; a number of micro-batches means plain 1F1B.

    With equal stages and free exchanges the makespan of 1F1B is (m + p - 1)(f + b):

    >>> from .costs import pipeline_costs
    >>> simulate(pipeline_costs([1.0] * 4, [2.0] * 4), 8).makespan_s.tolist()
    [33.0]
    >>> interleaved = Pipeline(num_stages=4, num_microbatches=8, num_virtual_stages=2)
    >>> costs = pipeline_costs([0.5] * 8, [1.0] * 8, num_virtual_stages=2)
    >>> simulate(costs, interleaved).makespan_s.tolist()
    [28.5]
    """
    pipeline = _checked(costs, pipeline)
    return Simulation(
        end_s=stage_ends(costs, pipeline),
        compute_s=_compute(costs, pipeline),
        transfer_s=_held(costs, pipeline),
    )


def spans(costs: PipelineCosts, pipeline: Pipeline | int) -> tuple[Span, ...]:
    """Every task of the first alternative in order of start, by the recurrence of the bulk."""
    pipeline = _checked(costs, pipeline)
    tables = cost_tables(costs, splits_backward=pipeline.splits_backward)
    times_s = {cost: table[:, 0].tolist() for cost, table in tables.items()}
    ends: list[float] = costs.start_s[:, 0].tolist()
    out: list[Span] = []
    for event in event_graph(pipeline).events:
        cost, place = event.cost
        start_s = max([ends[before] for before in event.inputs])
        ends.append(start_s + times_s[cost][place])
        out += [
            Span(stage, event.kind, event.chunk, event.microbatch, start_s, ends[-1])
            for stage in _shown_on(event)
        ]
    return tuple(sorted(out, key=lambda span: (span.start_s, span.stage, span.end_s)))


def simulate_least(runs: Sequence[tuple[PipelineCosts, Pipeline]]) -> list[Simulation]:
    """Of each, ends that no stage's last one comes before, and nothing of what lies between."""
    found = []
    for costs, pipeline in runs:
        least_s = least_makespans(
            costs.forward_s,
            costs.backward_s,
            pipeline.num_microbatches,
            num_stages=pipeline.num_stages,
            drains=not pipeline.splits_backward,
            message_s=np.minimum(costs.activation_s, costs.gradient_s),
        )
        end_s = np.broadcast_to(least_s, costs.start_s.shape)
        nothing = np.zeros_like(end_s)
        found.append(Simulation(end_s=end_s, compute_s=nothing, transfer_s=nothing))
    return found


def _checked(costs: PipelineCosts, pipeline: Pipeline | int) -> Pipeline:
    if isinstance(pipeline, int):
        pipeline = Pipeline(num_stages=costs.num_stages, num_microbatches=pipeline)
    found = (costs.num_stages, costs.num_chunks)
    if found != (pipeline.num_stages, pipeline.num_chunks):
        raise ConfigError(
            f"costs have {found[0]} stages and {found[1]} chunks, the pipeline "
            f"{pipeline.num_stages} and {pipeline.num_chunks}; give a row for each"
        )
    return pipeline


def _shown_on(event: TaskEvent) -> tuple[int, ...]:
    return (event.stage, event.peer) if event.kind is TaskKind.EXCHANGE else (event.stage,)


def _compute(costs: PipelineCosts, pipeline: Pipeline) -> Floats:
    passes = costs.forward_s + costs.backward_s
    local = passes.reshape(pipeline.num_virtual_stages, pipeline.num_stages, -1)
    return pipeline.num_microbatches * local.sum(axis=0)


def _held(costs: PipelineCosts, pipeline: Pipeline) -> Floats:
    tables = cost_tables(costs, splits_backward=pipeline.splits_backward)
    out = np.zeros((pipeline.num_stages, costs.num_columns))
    for held in event_graph(pipeline).held:
        out[held.stage] += held.count * np.max(
            [tables[cost][place] for cost, place in held.costs], axis=0
        )
    return out
