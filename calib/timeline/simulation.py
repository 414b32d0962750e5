"""Exact earliest-start times of a pipeline schedule, for many layouts at once or one in full.

If both ends of a message block, as in Megatron's batched point-to-point, an exchange starts when
both stages have arrived and blocks both until it ends. Other messages occupy their link, and block
only a stage that waits for them.

For many layouts the event graph is run as steps over few rows of columns. Each step is the
recurrence of the graph, ``end = max(ends of the inputs) + cost``. A row is reused after the last
event that reads it, so that the rows of a block of columns stay in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .graph import (
    CostPlace,
    EventGraph,
    PipelineCosts,
    TaskEvent,
    cost_tables,
    event_graph,
)
from .programs import Pipeline, TaskKind

Floats = NDArray[np.float64]
BLOCK_NBYTES = 8 * 1024 * 1024
"""Size of the rows of one block: small enough for a cache, and long enough to amortise the cost of
a call."""
LEAST_COLUMNS = 64
"""Least number of alternatives per block, however long the program."""
NONE = -1


Step = tuple[int, int, int, int]
"""Left, right, cost, target: ``rows[target] = max(rows[left], rows[right]) + rows[cost]``; -1 omits
an operand. A plain tuple, which the interpreter unpacks faster than a named one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Times in seconds, shape (stages, alternatives), from the start of the step."""

    end_s: Floats
    """End of the last task of each stage."""
    compute_s: Floats
    transfer_s: Floats
    """Seconds blocked by messages that a stage posts and waits for at once, without the wait for
    the other end; of several in one call, the longest. Others can hide; their exposed part is idle
    time."""

    @property
    def makespan_s(self) -> Floats:
        """End of the last stage to finish, shape (alternatives,)."""
        return self.end_s.max(axis=0)

    def columns(self, begin: int, end: int) -> Simulation:
        """Return the alternatives from ``begin`` up to ``end``."""
        part = slice(begin, end)
        return Simulation(
            end_s=self.end_s[:, part],
            compute_s=self.compute_s[:, part],
            transfer_s=self.transfer_s[:, part],
        )


class Span(NamedTuple):
    """One task of one stage in the simulated step."""

    stage: int
    """Stage; an exchange has a span on both of its stages, a transfer only on the sending one."""
    kind: TaskKind
    chunk: int
    """Chunk; for a message, the one before the boundary that it crosses."""
    microbatch: int
    start_s: float
    end_s: float

    def scaled(self, factor: float) -> Span:
        """Return the span in a step that takes ``factor`` times as long."""
        return self._replace(start_s=factor * self.start_s, end_s=factor * self.end_s)


def simulate(costs: PipelineCosts, pipeline: Pipeline | int) -> Simulation:
    """Simulate all alternatives with earliest starts; an integer ``pipeline`` is a number of
    micro-batches for plain 1F1B.

    With equal stages and free exchanges the makespan of 1F1B is (m + p - 1)(f + b):

    >>> from .graph import pipeline_costs
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
        transfer_s=_blocking_transfer_s(costs, pipeline),
    )


def spans(costs: PipelineCosts, pipeline: Pipeline | int) -> tuple[Span, ...]:
    """Return every task of the first alternative in order of start, with the recurrence of the bulk
    simulation."""
    pipeline = _checked(costs, pipeline)
    tables = cost_tables(costs)
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


def _checked(costs: PipelineCosts, pipeline: Pipeline | int) -> Pipeline:
    if isinstance(pipeline, int):
        pipeline = Pipeline(num_stages=costs.num_stages, num_microbatches=pipeline)
    costs_shape = (costs.num_stages, costs.num_chunks)
    if costs_shape != (pipeline.num_stages, pipeline.num_chunks):
        raise ConfigError(
            f"costs have {costs_shape[0]} stages and {costs_shape[1]} chunks, the pipeline "
            f"{pipeline.num_stages} and {pipeline.num_chunks}; give a row for each"
        )
    return pipeline


def _shown_on(event: TaskEvent) -> tuple[int, ...]:
    return (event.stage, event.peer) if event.kind is TaskKind.EXCHANGE else (event.stage,)


def _compute(costs: PipelineCosts, pipeline: Pipeline) -> Floats:
    passes = costs.forward_s + costs.backward_s
    local = passes.reshape(pipeline.num_virtual_stages, pipeline.num_stages, -1)
    return pipeline.num_microbatches * local.sum(axis=0)


def _blocking_transfer_s(costs: PipelineCosts, pipeline: Pipeline) -> Floats:
    tables = cost_tables(costs)
    out = np.zeros((pipeline.num_stages, costs.num_columns))
    for wait in event_graph(pipeline).blocking_waits:
        out[wait.stage] += wait.count * np.max(
            [tables[cost][place] for cost, place in wait.costs], axis=0
        )
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkProgram:
    """The rows and steps of one event graph."""

    costs: tuple[CostPlace, ...]
    """Costs in the rows that follow those of the starts, which come first."""
    num_rows: int
    steps: tuple[Step, ...]
    ends: tuple[int, ...]
    """Rows with the ends of the stages after all steps."""


def stage_ends(costs: PipelineCosts, pipeline: Pipeline) -> Floats:
    """Return the end of each stage, shape (stages, alternatives), in seconds."""
    program = bulk_program(pipeline)
    tables = cost_tables(costs)
    width = max(LEAST_COLUMNS, BLOCK_NBYTES // (8 * program.num_rows))
    out = np.empty((costs.num_stages, costs.num_columns))
    for begin in range(0, costs.num_columns, width):
        part = slice(begin, min(begin + width, costs.num_columns))
        rows = list(np.empty((program.num_rows, part.stop - part.start)))
        for row, start_s in zip(rows, costs.start_s, strict=False):
            row[:] = start_s[part]
        for row, (cost, place) in zip(rows[costs.num_stages :], program.costs, strict=False):
            row[:] = tables[cost][place, part]
        _run(program.steps, rows)
        for stage, row in enumerate(program.ends):
            out[stage, part] = rows[row]
    return out


def _run(steps: tuple[Step, ...], rows: list[Floats]) -> None:
    add, maximum = np.add, np.maximum
    for left, right, cost, target in steps:
        if right < 0:
            add(rows[left], rows[cost], out=rows[target])
        else:
            out = rows[target]
            maximum(rows[left], rows[right], out=out)
            if cost >= 0:
                add(out, rows[cost], out=out)


@lru_cache(maxsize=256)
def bulk_program(pipeline: Pipeline) -> BulkProgram:
    """Return the steps for ``event_graph(pipeline)``."""
    return _Writer(event_graph(pipeline)).build()


class _Writer:
    """Assigns each event a row and frees it after the last event that reads it."""

    def __init__(self, graph: EventGraph) -> None:
        self._graph = graph
        self._num_stages = graph.pipeline.num_stages
        self._costs = tuple(dict.fromkeys(event.cost for event in graph.events))
        self._cost_rows = {cost: self._num_stages + index for index, cost in enumerate(self._costs)}
        self._num_rows = self._num_stages + len(self._costs)
        self._rows = {stage: stage for stage in range(self._num_stages)}
        self._free: list[int] = []
        self._steps: list[Step] = []
        self._last_reader: dict[int, int] = {}

    def build(self) -> BulkProgram:
        graph = self._graph
        for number, event in enumerate(graph.events, self._num_stages):
            for before in event.inputs:
                self._last_reader[before] = number
        for last in graph.last:
            for number in last:
                self._last_reader.pop(number, None)
        for number, event in enumerate(graph.events, self._num_stages):
            self._write(number, event.inputs, self._cost_rows[event.cost])
        ends = tuple(self._end(last) for last in graph.last)
        return BulkProgram(
            costs=self._costs, num_rows=self._num_rows, steps=tuple(self._steps), ends=ends
        )

    def _write(self, number: int, inputs: tuple[int, ...], cost: int) -> None:
        dying = [before for before in inputs if self._last_reader.get(before) == number]
        # The first step may overwrite its own inputs, but no others.
        first, *others = dying + [before for before in inputs if before not in dying]
        sources = [self._rows[before] for before in (first, *others)]
        target = sources[0] if dying else self._take()
        self._rows[number] = target
        self._free += [self._rows[before] for before in dying if self._rows[before] != target]
        self._maximum(sources, target, cost)

    def _end(self, last: tuple[int, ...]) -> int:
        sources = [self._rows[number] for number in last]
        if len(sources) == 1:
            return sources[0]
        target = self._take()
        self._maximum(sources, target, NONE)
        return target

    def _maximum(self, sources: list[int], target: int, cost: int) -> None:
        left = sources[0]
        for index, right in enumerate(sources[1:], 2):
            is_last = index == len(sources)
            self._steps.append((left, right, cost if is_last else NONE, target))
            left = target
        if len(sources) == 1:
            self._steps.append((left, NONE, cost, target))

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_rows += 1
        return self._num_rows - 1
