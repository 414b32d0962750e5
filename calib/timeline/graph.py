"""The programs of all stages as one graph of events in topological order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..workload.argument_values import QuickEnum
from .programs import Item, Message, Pass, Pipeline, Post, TaskKind, Wait, receiver, sender
from .schedules import stage_program


class Duration(QuickEnum):
    """Cost that an event takes; per chunk, or per boundary between chunks."""

    FORWARD = "forward"
    BACKWARD = "backward"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    BOTH = "both"


CostPlace = tuple[Duration, int]
"""Cost of an event, and the chunk or boundary that it belongs to."""


_PASS_COSTS = {TaskKind.FORWARD: Duration.FORWARD, TaskKind.BACKWARD: Duration.BACKWARD}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockingWait:
    """Messages that a stage waits for as it posts them, and their number in a step."""

    costs: tuple[CostPlace, ...]
    stage: int
    count: int


class TaskEvent(NamedTuple):
    """A pass, an exchange or a transfer: it starts when the last of ``inputs`` has ended."""

    inputs: tuple[int, ...]
    """Events by number; the first ``num_stages`` numbers are the starts of the stages."""
    cost: CostPlace
    kind: TaskKind
    stage: int
    """Stage that computes or sends; for two crossing messages, the one that sends the
    activation."""
    peer: int
    """Stage at the other end; -1 for a pass."""
    chunk: int
    """Chunk, or boundary after that chunk."""
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventGraph:
    """Events in an order in which they can be timed one after another."""

    pipeline: Pipeline
    events: tuple[TaskEvent, ...]
    """Event number ``num_stages`` comes first."""
    last: tuple[tuple[int, ...], ...]
    """Events that end each stage's program."""
    blocking_waits: tuple[BlockingWait, ...]


@lru_cache(maxsize=256)
def event_graph(pipeline: Pipeline) -> EventGraph:
    """Return all events of a step; every layout of this size and schedule shares them."""
    return _Builder(pipeline).build()


class _Builder:
    """Runs the programs concurrently; a message becomes an event once both ends have posted."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._num_stages = pipeline.num_stages
        self._programs = [
            iter(stage_program(pipeline, stage)) for stage in range(pipeline.num_stages)
        ]
        self._events: list[TaskEvent] = []
        self._inputs: list[tuple[int, ...]] = [()] * self._num_stages
        self._earlier: list[frozenset[int]] = [frozenset()] * self._num_stages
        """Per event, its inputs and their inputs: far enough back to find redundant ones."""
        self._before: list[tuple[int, ...]] = [(stage,) for stage in range(self._num_stages)]
        """Per stage, the events that its next one waits for."""
        self._posted: dict[Message, tuple[Post, tuple[int, ...]]] = {}
        self._numbers: dict[Message, int] = {}
        self._links: dict[tuple[int, int], int] = {}
        """Last transfer from one stage to another."""
        self._blocking_waits: Counter[tuple[frozenset[CostPlace], int]] = Counter()
        self._last_post: list[Post | None] = [None] * self._num_stages

    def build(self) -> EventGraph:
        stuck: list[Wait | None] = [None] * self._num_stages
        running = list(range(self._num_stages))
        while running:
            before = self._progress()
            for stage in tuple(running):
                stuck[stage] = self._run(stage, stuck[stage])
                if stuck[stage] is None:
                    running.remove(stage)
            moved = self._progress() != before
            assert moved or not running, f"stages {running} wait for each other for ever"
        assert not self._posted, f"one end only: {list(self._posted)[:3]}"
        return EventGraph(
            pipeline=self._pipeline,
            events=tuple(self._events),
            last=tuple(self._needed(before) for before in self._before),
            blocking_waits=tuple(
                BlockingWait(costs=tuple(costs), stage=stage, count=count)
                for (costs, stage), count in self._blocking_waits.items()
            ),
        )

    def _run(self, stage: int, stuck: Wait | None) -> Wait | None:
        """Run up to the first message that is not there yet, and return that wait."""
        for item in self._rest(stage, stuck):
            if isinstance(item, Pass):
                self._compute(stage, item)
            elif isinstance(item, Post):
                self._post(stage, item)
            elif all(message in self._numbers for message in item.messages):
                self._wait(stage, item)
            else:
                return item
        return None

    def _progress(self) -> tuple[int, ...]:
        return len(self._events), len(self._posted), *map(len, self._before)

    def _rest(self, stage: int, stuck: Wait | None) -> Iterator[Item]:
        if stuck is not None:
            yield stuck
        yield from self._programs[stage]

    def _compute(self, stage: int, task: Pass) -> None:
        number = self._add(
            TaskEvent(
                inputs=self._needed(self._before[stage]),
                cost=(_PASS_COSTS[task.kind], task.chunk),
                kind=task.kind,
                stage=stage,
                peer=-1,
                chunk=task.chunk,
                microbatch=task.microbatch,
            )
        )
        self._before[stage] = (number,)

    def _post(self, stage: int, post: Post) -> None:
        """Create transfers whose other end is posted too, grouped by the batch it was posted in."""
        self._last_post[stage] = post
        ready: dict[int, list[Message]] = {}
        for message in post.messages:
            if message not in self._posted:
                self._posted[message] = post, self._before[stage]
            else:
                ready.setdefault(id(self._posted[message][0]), []).append(message)
        for messages in ready.values():
            other, there = self._posted[messages[0]]
            posted = (*self._before[stage], *there)
            is_blocking = post.is_blocking and other.is_blocking
            is_both = len(messages) == 2 and messages[0].is_gradient != messages[1].is_gradient
            together = [messages] if is_blocking and is_both else [[one] for one in messages]
            for some in together:
                self._transfer(some, posted, is_blocking)
                for message in some:
                    del self._posted[message]

    def _transfer(
        self, messages: list[Message], posted: tuple[int, ...], is_blocking: bool
    ) -> None:
        """Create one message, or one activation down and one gradient up at once."""
        first = messages[0]
        if len(messages) > 1 and first.is_gradient:
            first = messages[1]
        stage = sender(first, self._num_stages)
        peer = receiver(first, self._num_stages)
        # A blocking stage has waited for all earlier transfers.
        link = self._links.get((stage, peer))
        after = () if link is None or (is_blocking and self._is_exchange(link)) else (link,)
        number = self._add(
            TaskEvent(
                inputs=self._needed((*posted, *after)),
                cost=(_message_cost(messages), first.boundary),
                kind=TaskKind.EXCHANGE if is_blocking else TaskKind.TRANSFER,
                stage=stage,
                peer=peer,
                chunk=first.boundary,
                microbatch=first.microbatch,
            )
        )
        for message in messages:
            ends = sender(message, self._num_stages), receiver(message, self._num_stages)
            self._links[ends] = number
            self._numbers[message] = number

    def _wait(self, stage: int, wait: Wait) -> None:
        numbers = tuple(dict.fromkeys(self._numbers[message] for message in wait.messages))
        self._before[stage] += numbers
        post = self._last_post[stage]
        if post and post.is_blocking and post.messages == wait.messages:
            costs = {self._events[number - self._num_stages].cost for number in numbers}
            self._blocking_waits[frozenset(costs), stage] += 1

    def _is_exchange(self, number: int) -> bool:
        return self._events[number - self._num_stages].kind is TaskKind.EXCHANGE

    def _add(self, event: TaskEvent) -> int:
        self._events.append(event)
        of_inputs = (self._inputs[number] for number in event.inputs)
        self._earlier.append(frozenset(event.inputs).union(*of_inputs))
        self._inputs.append(event.inputs)
        return len(self._inputs) - 1

    def _needed(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the inputs that do not precede another one; no time is negative."""
        if len(numbers) == 1:
            return numbers
        earlier = self._earlier
        return tuple(
            number
            for number in dict.fromkeys(numbers)
            if not any(number in earlier[other] for other in numbers)
        )


def _message_cost(messages: list[Message]) -> Duration:
    if len(messages) > 1:
        return Duration.BOTH
    return Duration.GRADIENT if messages[0].is_gradient else Duration.ACTIVATION


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """Seconds per micro-batch, none negative; the second axis is that of the alternatives.

    Passes have a row per chunk (chunk c runs on stage c % pp), messages have one per boundary
    between chunk b and chunk b + 1. Without interleaving a chunk is a stage.
    """

    forward_s: Floats
    backward_s: Floats
    activation_s: Floats
    gradient_s: Floats
    both_s: Floats
    """An activation down and a gradient up in one exchange."""
    start_s: Floats
    """Earliest start of a stage, shape (stages, alternatives)."""

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return int(self.start_s.shape[0])

    @property
    def num_chunks(self) -> int:
        """Chunks of the model."""
        return int(self.forward_s.shape[0])

    @property
    def num_columns(self) -> int:
        """Number of alternatives."""
        return int(self.forward_s.shape[1])


def pipeline_costs(
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    *,
    activation_s: ArrayLike = 0.0,
    gradient_s: ArrayLike = 0.0,
    both_s: ArrayLike | None = None,
    start_s: ArrayLike = 0.0,
    num_virtual_stages: int = 1,
) -> PipelineCosts:
    """Return costs from per-chunk values, with a single column if no alternatives are given.

    Messages and starts may be scalars; ``both_s`` is the longer of the two directions if omitted.
    """
    forward = _columns(forward_s)
    shape = forward.shape
    edges = (max(shape[0] - 1, 0), shape[1])
    activation = _shaped(activation_s, edges)
    gradient = _shaped(gradient_s, edges)
    both = np.maximum(activation, gradient) if both_s is None else _shaped(both_s, edges)
    return PipelineCosts(
        forward_s=forward,
        backward_s=_shaped(backward_s, shape),
        activation_s=activation,
        gradient_s=gradient,
        both_s=both,
        start_s=_shaped(start_s, (shape[0] // num_virtual_stages, shape[1])),
    )


def concat_costs(many: Sequence[PipelineCosts]) -> PipelineCosts:
    """Concatenate alternatives of equal numbers of stages, for a single simulation."""
    names = PipelineCosts.__dataclass_fields__
    return PipelineCosts(
        **{name: np.concatenate([getattr(costs, name) for costs in many], axis=1) for name in names}
    )


def cost_tables(costs: PipelineCosts) -> dict[Duration, Floats]:
    """Return the rows of each cost that an event may have."""
    return {
        Duration.FORWARD: costs.forward_s,
        Duration.BACKWARD: costs.backward_s,
        Duration.ACTIVATION: costs.activation_s,
        Duration.GRADIENT: costs.gradient_s,
        Duration.BOTH: costs.both_s,
    }


def _columns(values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    return array[:, np.newaxis] if array.ndim == 1 else array


def _shaped(values: ArrayLike, shape: tuple[int, ...]) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 1:
        array = array[:, np.newaxis]
    return np.broadcast_to(array, shape)
