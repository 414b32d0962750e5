"""Exact earliest-start times of a pipeline schedule, for many layouts at once or one in full.

Where both ends of a message block, as in Megatron's batched point-to-point, an exchange starts when
both stages have arrived and holds both until it ends.  Other messages occupy their link, and hold
only the stage that waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .bulk import stage_ends
from .costs import PipelineCosts, cost_tables, joined, pipeline_costs
from .graph import event_graph
from .programs import Pipeline
from .spans import Span, StageUse, Timeline, spans_of
from .spans import timeline as _timeline

__all__ = [
    "Pipeline",
    "PipelineCosts",
    "Simulation",
    "Span",
    "StageUse",
    "Timeline",
    "joined",
    "pipeline_costs",
    "simulate",
    "spans",
    "timeline",
]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Times in seconds, shape (stages, alternatives), from the start of the step."""

    end_s: Floats
    """When a stage has finished its last task."""
    compute_s: Floats
    transfer_s: Floats
    """Held by messages that it posts and waits for at once, without the wait for the other end; of
    several in one call, the longest.  Others can hide, and what does not is in ``idle_s``."""

    @property
    def makespan_s(self) -> Floats:
        """When the last stage to finish has finished, shape (alternatives,)."""
        return self.end_s.max(axis=0)

    @property
    def idle_s(self) -> Floats:
        """What remains of the makespan on each stage: waiting for others."""
        return self.makespan_s - self.compute_s - self.transfer_s

    def columns(self, begin: int, end: int) -> Simulation:
        """The alternatives from ``begin`` up to ``end``."""
        part = slice(begin, end)
        return Simulation(
            end_s=self.end_s[:, part],
            compute_s=self.compute_s[:, part],
            transfer_s=self.transfer_s[:, part],
        )


def simulate(costs: PipelineCosts, pipeline: Pipeline | int) -> Simulation:
    """Earliest-start times of all alternatives; a number of micro-batches means plain 1F1B.

    With equal stages and free exchanges the makespan of 1F1B is (m + p - 1)(f + b):

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


def timeline(costs: PipelineCosts, pipeline: Pipeline | int, *, column: int = 0) -> Timeline:
    """One alternative in full: spans, critical path, and what each stage spends its time on."""
    return _timeline(costs, _checked(costs, pipeline), column=column)


def spans(costs: PipelineCosts, pipeline: Pipeline | int, *, column: int = 0) -> tuple[Span, ...]:
    """Every task of one alternative with its times, in order of start."""
    return spans_of(costs, _checked(costs, pipeline), column=column)


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


def _compute(costs: PipelineCosts, pipeline: Pipeline) -> Floats:
    passes = costs.forward_s if pipeline.is_forward_only else costs.forward_s + costs.backward_s
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
