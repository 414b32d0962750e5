"""Ends of the stages for many layouts at once: the event graph as steps over few rows of columns.

Each step is the recurrence of the graph, ``end = max(ends of the inputs) + cost``.  A row holds an
end only until the last event that reads it, so that the rows of a block of columns stay in a
cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .costs import PipelineCosts, cost_tables
from .graph import CostPlace, EventGraph, event_graph
from .programs import Pipeline

Floats = NDArray[np.float64]
BLOCK_NBYTES = 8 * 1024 * 1024
"""Rows of one block: small enough for a cache, and long enough to hide the cost of a call."""
LEAST_COLUMNS = 64
"""Alternatives side by side at least, however long the program."""
NONE = -1


Step = tuple[int, int, int, int]
"""Left, right, cost, target: ``rows[target] = max(rows[left], rows[right]) + rows[cost]``, where -1
leaves a part out.  A plain tuple, which the interpreter unpacks faster than a named one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkProgram:
    """The rows and steps of one event graph."""

    costs: tuple[CostPlace, ...]
    """Contents of the rows that follow those of the starts, which come first."""
    num_rows: int
    steps: tuple[Step, ...]
    ends: tuple[int, ...]
    """Rows of the ends of the stages when all steps are done."""


def stage_ends(costs: PipelineCosts, pipeline: Pipeline) -> Floats:
    """When each stage has finished, shape (stages, alternatives), in seconds."""
    program = bulk_program(pipeline)
    tables = cost_tables(costs, splits_backward=pipeline.splits_backward)
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
    """Steps for ``event_graph(pipeline)``."""
    return _Writer(event_graph(pipeline)).build()


class _Writer:
    """Gives each event a row and takes it back after the last event that reads it."""

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
        # The first step may write over what it reads, and only over that.
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
