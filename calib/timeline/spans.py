"""One simulated step in full: every pass and message, what decided its length, who idled when."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .costs import PipelineCosts, cost_tables
from .graph import CostPlace, EventGraph, event_graph
from .programs import Pipeline, TaskKind

Floats = NDArray[np.float64]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """Where the step of one stage goes, in seconds; the three add up to the makespan."""

    busy_s: float
    """Passes."""
    exposed_s: float
    """No pass runs, and a message that the stage waits for is on its way."""
    bubble_s: float
    """Neither: waiting for another stage, for its own start, or for the last one to finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One alternative in full."""

    makespan_s: float
    spans: tuple[Span, ...]
    """In order of start."""
    critical: tuple[Span, ...]
    """The chain that decides the makespan: each begins as the one before it ends, the first at the
    start of its stage, and the last ends with the step."""
    stages: tuple[StageUse, ...]


def timeline(costs: PipelineCosts, pipeline: Pipeline, *, column: int = 0) -> Timeline:
    """Every task of one alternative, by the recurrence that ``simulate`` runs in bulk."""
    graph = event_graph(pipeline)
    times = _times(costs, graph, column)
    makespan = float(times.end_s[[number for last in graph.last for number in last]].max())
    return Timeline(
        makespan_s=makespan,
        spans=_spans(graph, times),
        critical=_critical(graph, times, makespan),
        stages=tuple(
            _stage_use(graph, times, stage, makespan) for stage in range(pipeline.num_stages)
        ),
    )


def spans_of(costs: PipelineCosts, pipeline: Pipeline, *, column: int = 0) -> tuple[Span, ...]:
    """The spans of ``timeline`` alone."""
    graph = event_graph(pipeline)
    return _spans(graph, _times(costs, graph, column))


class _Times(NamedTuple):
    """Starts and ends of all events by number; those of the stages first, and instantaneous."""

    start_s: Floats
    end_s: Floats


def _times(costs: PipelineCosts, graph: EventGraph, column: int) -> _Times:
    if not -costs.num_columns <= column < costs.num_columns:
        raise ConfigError(f"column {column}: there are {costs.num_columns}; choose one of them")
    tables = cost_tables(costs, splits_backward=graph.pipeline.splits_backward)
    lists = {cost: table[:, column].tolist() for cost, table in tables.items()}
    order = _order(graph.pipeline)
    values = [lists[cost][place] for cost, place in order.costs]
    starts: list[float] = costs.start_s[:, column].tolist()
    ends = starts.copy()
    for first, others, cost in order.events:
        start = ends[first]
        for before in others:
            if ends[before] > start:
                start = ends[before]
        starts.append(start)
        ends.append(start + values[cost])
    return _Times(np.array(starts), np.array(ends))


class _Order(NamedTuple):
    """Per event one of its inputs, the others, and the place of its cost: quick to run through."""

    costs: tuple[CostPlace, ...]
    events: tuple[tuple[int, tuple[int, ...], int], ...]


@lru_cache(maxsize=64)
def _order(pipeline: Pipeline) -> _Order:
    events = event_graph(pipeline).events
    costs = tuple(dict.fromkeys(event.cost for event in events))
    places = {cost: index for index, cost in enumerate(costs)}
    return _Order(costs, tuple((e.inputs[0], e.inputs[1:], places[e.cost]) for e in events))


def _spans(graph: EventGraph, times: _Times) -> tuple[Span, ...]:
    shown = _shown(graph.pipeline)
    start, end = (values[shown.numbers] for values in times)
    order = np.lexsort((end, shown.stages, start))
    columns = (shown.stages, shown.kinds, shown.chunks, shown.microbatches, start, end)
    return tuple(map(Span, *(column[order].tolist() for column in columns)))


class _Shown(NamedTuple):
    """What spans show of each event, as columns."""

    numbers: NDArray[np.int64]
    stages: NDArray[np.int64]
    kinds: NDArray[np.object_]
    chunks: NDArray[np.int64]
    microbatches: NDArray[np.int64]


@lru_cache(maxsize=64)
def _shown(pipeline: Pipeline) -> _Shown:
    rows = [
        (number, stage, event.kind, event.chunk, event.microbatch)
        for number, event in enumerate(event_graph(pipeline).events, pipeline.num_stages)
        for stage in (
            (event.stage, event.peer) if event.kind is TaskKind.EXCHANGE else (event.stage,)
        )
    ]
    numbers, stages, kinds, chunks, microbatches = zip(*rows, strict=True)
    return _Shown(
        np.array(numbers),
        np.array(stages),
        np.array(kinds, dtype=object),
        np.array(chunks),
        np.array(microbatches),
    )


def _critical(graph: EventGraph, times: _Times, makespan_s: float) -> tuple[Span, ...]:
    """Back from the last end, always to an input that ended when the event began."""
    first = graph.pipeline.num_stages
    number = next(n for last in graph.last for n in last if times.end_s[n] == makespan_s)
    chain: list[Span] = []
    while number >= first:
        event = graph.events[number - first]
        span = Span(
            event.stage,
            event.kind,
            event.chunk,
            event.microbatch,
            float(times.start_s[number]),
            float(times.end_s[number]),
        )
        chain.append(span)
        number = next(n for n in event.inputs if times.end_s[n] == span.start_s)
    return tuple(reversed(chain))


def _stage_use(graph: EventGraph, times: _Times, stage: int, makespan_s: float) -> StageUse:
    own = list(_passes(graph.pipeline)[stage])
    both = own + list(graph.waited[stage])
    busy = float((times.end_s[own] - times.start_s[own]).sum())
    covered = _covered(times.start_s[both], times.end_s[both])
    return StageUse(busy_s=busy, exposed_s=covered - busy, bubble_s=makespan_s - covered)


@lru_cache(maxsize=64)
def _passes(pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
    """Numbers of the passes of each stage."""
    out: list[list[int]] = [[] for _ in range(pipeline.num_stages)]
    for number, event in enumerate(event_graph(pipeline).events, pipeline.num_stages):
        if event.peer < 0:
            out[event.stage].append(number)
    return tuple(map(tuple, out))


def _covered(start_s: Floats, end_s: Floats) -> float:
    """Length of the union of intervals.

    >>> _covered(np.array([0.0, 5.0, 1.0]), np.array([2.0, 6.0, 3.0]))
    4.0
    """
    order = np.argsort(start_s)
    start, end = start_s[order], end_s[order]
    before = np.maximum.accumulate(np.concatenate([start[:1], end[:-1]]))
    return float(np.maximum(end - np.maximum(start, before), 0.0).sum())
