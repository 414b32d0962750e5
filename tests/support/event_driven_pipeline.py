"""A pipeline run event by event over the programs of its stages, and pipelines to run.

Slow and plain: a heap of moments, a process per stage, a queue per link.  It shares with the
simulator only the programs.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

import numpy as np
from hypothesis import strategies as st

from forerun.calib.timeline.graph import PipelineCosts, pipeline_costs
from forerun.calib.timeline.programs import (
    Item,
    Message,
    Pass,
    Pipeline,
    Post,
    TaskKind,
    Wait,
    receiver,
    sender,
)
from forerun.calib.timeline.schedules import stage_program


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Draw plain and interleaved pipelines, in small sizes, with groups that Megatron accepts."""
    if draw(st.booleans()):
        return Pipeline(
            num_stages=draw(st.integers(1, 5)),
            num_microbatches=draw(st.integers(1, 12)),
        )
    overlaps = draw(st.booleans())
    stages = draw(st.integers(2 if overlaps else 3, 4))
    group = draw(st.integers(stages, stages + 3))
    rest = draw(st.sampled_from([0, *range(stages, group)]))
    return Pipeline(
        num_stages=stages,
        num_virtual_stages=draw(st.integers(2, 3)),
        num_microbatches=group * draw(st.integers(1, 2)) + rest,
        microbatch_group_size=group,
        overlaps_p2p=overlaps,
        overlaps_p2p_ends=overlaps and draw(st.booleans()),
    )


@st.composite
def costs_of(draw: st.DrawFn, pipeline: Pipeline, num_columns: int = 1) -> PipelineCosts:
    """Draw uneven passes and messages."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chunks, edges = pipeline.num_chunks, pipeline.num_chunks - 1
    longest = draw(st.sampled_from([0.0, 0.3, 3.0]))
    return pipeline_costs(
        rng.uniform(0.1, 2.0, (chunks, num_columns)),
        rng.uniform(0.1, 3.0, (chunks, num_columns)),
        activation_s=rng.uniform(0.0, longest, (edges, num_columns)),
        gradient_s=rng.uniform(0.0, longest, (edges, num_columns)),
        both_s=rng.uniform(longest, 2 * longest, (edges, num_columns)),
        start_s=rng.uniform(0.0, longest, (pipeline.num_stages, num_columns)),
        num_virtual_stages=pipeline.num_virtual_stages,
    )


def column_of(costs: PipelineCosts, column: int) -> PipelineCosts:
    """Return one column of the costs."""
    names = PipelineCosts.__dataclass_fields__
    return PipelineCosts(**{name: getattr(costs, name)[:, [column]] for name in names})


def passes(program: Iterable[Item]) -> list[Pass]:
    """Return the computations of a program in order."""
    return [item for item in program if isinstance(item, Pass)]


def peak_in_flight(pipeline: Pipeline, stage: int) -> int:
    """Return the most forward passes of ``stage`` whose activations are retained at once, one chunk
    each."""
    in_flight = peak = 0
    for task in passes(stage_program(pipeline, stage)):
        in_flight += (task.kind is TaskKind.FORWARD) - (task.kind is TaskKind.BACKWARD)
        peak = max(peak, in_flight)
    return peak


class EventDriven:
    """A run of one column of costs, complete on construction."""

    def __init__(self, pipeline: Pipeline, costs: PipelineCosts, column: int = 0) -> None:
        self.pipeline, self.costs, self.column = pipeline, costs, column
        self.passes: dict[tuple[int, Pass], tuple[float, float]] = {}
        self.arrived: dict[Message, tuple[float, float]] = {}
        """Start and end of each message, seconds."""
        self.end_s = costs.start_s[:, column].tolist()
        self._posted: dict[Message, Post] = {}
        self._queues: dict[tuple[int, int], deque[list[Message]]] = defaultdict(deque)
        self._busy: set[tuple[int, int]] = set()
        self._waiting: dict[int, Wait] = {}
        self._programs = [
            iter(stage_program(pipeline, stage)) for stage in range(pipeline.num_stages)
        ]
        self._ticket = itertools.count()
        self._heap: list[tuple[float, int, int, list[Message]]] = []
        for stage, start in enumerate(list(self.end_s)):
            self._at(start, stage, [])
        while self._heap:
            now, _, stage, messages = heapq.heappop(self._heap)
            if messages:
                self._arrive(now, messages)
            else:
                self._resume(now, stage)
        assert not self._waiting and not self._posted

    def _at(self, time_s: float, stage: int, messages: list[Message]) -> None:
        heapq.heappush(self._heap, (time_s, next(self._ticket), stage, messages))

    def _resume(self, now: float, stage: int) -> None:
        self.end_s[stage] = now
        for item in self._programs[stage]:
            if isinstance(item, Pass):
                end = now + self._pass_s(item)
                self.passes[stage, item] = now, end
                self._at(end, stage, [])
                return
            if isinstance(item, Post):
                self._post(now, item)
            elif not self._has(item, now):
                self._waiting[stage] = item
                return

    def _has(self, wait: Wait, now: float) -> bool:
        return all(m in self.arrived and self.arrived[m][1] <= now for m in wait.messages)

    def _post(self, now: float, post: Post) -> None:
        by_other: dict[int, list[Message]] = {}
        others: dict[int, Post] = {}
        for message in post.messages:
            if message in self._posted:
                other = self._posted.pop(message)
                others[id(other)] = other
                by_other.setdefault(id(other), []).append(message)
            else:
                self._posted[message] = post
        for key, messages in by_other.items():
            together = post.is_blocking and others[key].is_blocking and len(messages) == 2
            if together and messages[0].is_gradient != messages[1].is_gradient:
                self._start(now, messages)
            else:
                for message in messages:
                    link = self._link(message)
                    self._queues[link].append([message])
                    self._serve(now, link)

    def _link(self, message: Message) -> tuple[int, int]:
        n = self.pipeline.num_stages
        return sender(message, n), receiver(message, n)

    def _serve(self, now: float, link: tuple[int, int]) -> None:
        if link not in self._busy and self._queues[link]:
            self._busy.add(link)
            self._start(now, self._queues[link].popleft())

    def _start(self, now: float, messages: list[Message]) -> None:
        end = now + self._message_s(messages)
        for message in messages:
            self.arrived[message] = now, end
        self._at(end, -1, messages)

    def _arrive(self, now: float, messages: list[Message]) -> None:
        for message in messages:
            self._busy.discard(self._link(message))
            self._serve(now, self._link(message))
        for stage, wait in list(self._waiting.items()):
            if self._has(wait, now):
                del self._waiting[stage]
                self._resume(now, stage)

    def _pass_s(self, task: Pass) -> float:
        at = task.chunk, self.column
        is_forward = task.kind is TaskKind.FORWARD
        return float((self.costs.forward_s if is_forward else self.costs.backward_s)[at])

    def _message_s(self, messages: list[Message]) -> float:
        if len(messages) == 2:
            table = self.costs.both_s
        else:
            table = self.costs.gradient_s if messages[0].is_gradient else self.costs.activation_s
        boundary = min(messages, key=lambda message: message.is_gradient).boundary
        return float(table[boundary, self.column])


def links(pipeline: Pipeline) -> Iterator[tuple[list[Message], list[Message]]]:
    """Yield messages sent and received, in order, for each link and direction of the data."""
    n = pipeline.num_stages
    sent: dict[tuple[int, int, bool], list[Message]] = defaultdict(list)
    received: dict[tuple[int, int, bool], list[Message]] = defaultdict(list)
    for stage in range(n):
        for item in stage_program(pipeline, stage):
            for message in item.messages if isinstance(item, Post) else ():
                link = sender(message, n), receiver(message, n)
                side = sent if link[0] == stage else received
                side[(*link, message.is_gradient)].append(message)
    for link in sent.keys() | received.keys():
        yield sent[link], received[link]
