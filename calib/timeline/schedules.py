"""The order in which each stage computes and exchanges messages: 1F1B, plain and interleaved.

Interleaved 1F1B as ``megatron.core`` 0.16.1 runs it: several chunks per stage.

It follows ``forward_backward_pipelining_with_interleaving`` step by step, in its posts and in the
handles that it waits for. Pass k of a stage is its k-th in forward order (or in backward order,
with the chunks reversed).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .programs import Item, Message, Pass, Pipeline, Post, TaskKind, Wait


class ScheduleEntry(NamedTuple):
    """One entry of Megatron's schedule table; chunks are numbered within their stage."""

    microbatch: int
    local_chunk: int


def schedule_table(pipeline: Pipeline) -> tuple[ScheduleEntry, ...]:
    """Return the micro-batch and local chunk of each forward pass; all stages have the same.

    >>> pipeline = Pipeline(num_stages=2, num_microbatches=5, num_virtual_stages=2,
    ...                     microbatch_group_size=3)
    >>> [place.microbatch for place in schedule_table(pipeline)]
    [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    """
    m, group = pipeline.num_microbatches, pipeline.group_size
    return tuple(
        ScheduleEntry(microbatch, chunk)
        for first in range(0, m, group)
        for chunk in range(pipeline.num_virtual_stages)
        for microbatch in range(first, min(first + group, m))
    )


def num_interleaved_warmup(pipeline: Pipeline, stage: int) -> int:
    """Return the forward passes before the first backward one (``get_pp_rank_microbatches``).

    >>> pipeline = Pipeline(num_stages=4, num_microbatches=8, num_virtual_stages=2)
    >>> [num_interleaved_warmup(pipeline, stage) for stage in range(4)]
    [10, 8, 6, 4]
    """
    total = pipeline.num_microbatches * pipeline.num_virtual_stages
    ahead = 2 * (pipeline.num_stages - stage - 1)
    return min(total, ahead + (pipeline.num_virtual_stages - 1) * pipeline.group_size)


def interleaved_program(pipeline: Pipeline, stage: int) -> tuple[Item, ...]:
    """Return the program of ``stage``: warm-up, one forward one backward, cool-down."""
    return _InterleavedWriter(pipeline, stage).build()


class _Direction:
    """The passes of one direction on one stage: their chunks, their messages, open handles."""

    def __init__(
        self, pipeline: Pipeline, stage: int, table: tuple[ScheduleEntry, ...], *, is_gradient: bool
    ) -> None:
        self._pipeline = pipeline
        self._stage = stage
        self._table = table
        self._is_gradient = is_gradient
        self.is_leading = stage == (pipeline.num_stages - 1 if is_gradient else 0)
        """True on the stage where this direction begins."""
        self.receiving: deque[Message] = deque()
        """Receives posted and not yet waited for, oldest first."""
        self.sending: list[Message] = []
        """Sends posted last."""

    def task(self, k: int) -> Pass:
        kind = TaskKind.BACKWARD if self._is_gradient else TaskKind.FORWARD
        return Pass(kind, self._chunk(k), self._table[k].microbatch)

    def needed(self, k: int) -> list[Message]:
        """Return the input of pass k; nothing on the chunk where this direction begins."""
        return self._across(self._chunk(k) - (not self._is_gradient), k)

    def sent(self, k: int) -> list[Message]:
        """Return the output of pass k; nothing on the chunk where this direction ends."""
        return self._across(self._chunk(k) - self._is_gradient, k)

    def received(self, k: int) -> list[Message]:
        """Return the messages that Megatron receives during or after pass k.

        That is the input of the next pass, except on the leading stage: it receives the output of
        the last one, ``num_stages - 1`` passes behind it, and may buffer it for a while.
        """
        if k == len(self._table) - 1:
            return []
        if not self.is_leading:
            return self.needed(k + 1)
        aligned = k - (self._pipeline.num_stages - 1)
        if aligned < 0:
            return []
        last = self._pipeline.num_stages - 1
        ending = self._chunk(aligned) + (-last if self._is_gradient else last)
        return self._across(ending - self._is_gradient, aligned)

    def _across(self, boundary: int, k: int) -> list[Message]:
        if not 0 <= boundary < self._pipeline.num_chunks - 1:
            return []
        return [Message(boundary, self._table[k].microbatch, self._is_gradient)]

    def _chunk(self, k: int) -> int:
        local = self._table[k].local_chunk
        if self._is_gradient:
            local = self._pipeline.num_virtual_stages - 1 - local
        return local * self._pipeline.num_stages + self._stage


class _InterleavedWriter:
    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        table = schedule_table(pipeline)
        self._forward = _Direction(pipeline, stage, table, is_gradient=False)
        self._backward = _Direction(pipeline, stage, table, is_gradient=True)
        self._total = len(table)
        self._warmup = num_interleaved_warmup(pipeline, stage)
        self._is_async = pipeline.overlaps_p2p
        self._is_async_at_ends = pipeline.overlaps_p2p and pipeline.overlaps_p2p_ends
        self._items: list[Item] = []

    def build(self) -> tuple[Item, ...]:
        self._exchange(self._forward.needed(0))
        for k in range(self._warmup):
            self._warm_up(k)
        remaining = self._total - self._warmup
        for k in range(remaining):
            if self._is_async:
                self._steady_overlapped(k)
            else:
                self._steady(k)
        if not remaining:
            self._exchange(self._backward.needed(0))
        for k in range(remaining, self._total):
            self._cool_down(k)
        self._wait(self._backward.sending)
        return tuple(self._items)

    def _warm_up(self, k: int) -> None:
        is_last = k == self._warmup - 1 and self._warmup < self._total
        first_gradient = self._backward.needed(0) if is_last else []
        if self._is_async_at_ends:
            self._end_pass_overlapped(self._forward, k)
        else:
            self._items.append(self._forward.task(k))
            also = [] if self._is_async else first_gradient
            self._exchange(self._forward.sent(k) + self._forward.received(k) + also)
        if self._is_async and is_last:
            self._post(self._backward, [], first_gradient)

    def _cool_down(self, k: int) -> None:
        if self._is_async_at_ends:
            self._end_pass_overlapped(self._backward, k)
            return
        if k:
            self._await_input(self._backward, k)
        self._items.append(self._backward.task(k))
        self._exchange(self._backward.sent(k) + self._backward.received(k))

    def _end_pass_overlapped(self, way: _Direction, k: int) -> None:
        """Write a pass of warm-up or cool-down; all but the leading stage post the next receive
        first."""
        if k:
            self._await_input(way, k)
        received = way.received(k)
        if not way.is_leading:
            self._post_receive(way, received)
        self._items.append(way.task(k))
        self._post(way, way.sent(k), received if way.is_leading else [])

    def _steady_overlapped(self, k: int) -> None:
        ahead = k + self._warmup
        for way, index in ((self._forward, ahead), (self._backward, k)):
            self._await_input(way, index)
            self._items.append(way.task(index))
            # The input of the last forward pass was received ahead, and no other follows.
            self._post(way, way.sent(index), way.received(index))

    def _steady(self, k: int) -> None:
        ahead = k + self._warmup
        self._items += [self._forward.task(ahead), self._backward.task(k)]
        self._exchange(
            self._forward.sent(ahead)
            + self._backward.sent(k)
            + self._forward.received(ahead)
            + self._backward.received(k)
        )

    def _await_input(self, way: _Direction, k: int) -> None:
        """Wait for the oldest open handle, as Megatron does, whichever input that is."""
        if way.needed(k) and way.receiving:
            self._wait([way.receiving.popleft()])

    def _post(self, way: _Direction, sent: list[Message], received: list[Message]) -> None:
        """Post without waiting, except for the previous send."""
        if sent or received:
            self._items.append(Post((*sent, *received), is_blocking=False))
        self._wait(way.sending)
        way.sending = sent
        way.receiving.extend(received)

    def _post_receive(self, way: _Direction, received: list[Message]) -> None:
        if received:
            self._items.append(Post(tuple(received), is_blocking=False))
            way.receiving.extend(received)

    def _exchange(self, messages: list[Message]) -> None:
        if messages:
            both = tuple(messages)
            self._items += [Post(both, is_blocking=True), Wait(both)]

    def _wait(self, messages: list[Message]) -> None:
        if messages:
            self._items.append(Wait(tuple(messages)))


def num_warmup(num_stages: int, num_microbatches: int, stage: int) -> int:
    """Return the forward passes before the first backward one, without interleaving.

    >>> [num_warmup(4, 8, stage) for stage in range(4)]
    [3, 2, 1, 0]
    """
    return min(num_stages - stage - 1, num_microbatches)


def stage_program(pipeline: Pipeline, stage: int) -> tuple[Item, ...]:
    """Return the program of ``stage`` for a step, in order."""
    if pipeline.num_virtual_stages > 1:
        return interleaved_program(pipeline, stage)
    return _Blocking(pipeline, stage).one_forward_one_backward()


class _Blocking:
    """Writes a program in which a stage waits for each batch of messages as it posts it.

    It follows ``forward_backward_no_pipelining`` and ``_pipelining_without_interleaving`` of
    ``megatron.core`` 0.16.1. Missing neighbours cost nothing.
    """

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        self._stage = stage
        self._num_microbatches = pipeline.num_microbatches
        self._warmup = num_warmup(pipeline.num_stages, pipeline.num_microbatches, stage)
        self._last_boundary = pipeline.num_stages - 2
        self._items: list[Item] = []

    def one_forward_one_backward(self) -> tuple[Item, ...]:
        steady = self._num_microbatches - self._warmup
        for index in range(self._warmup):
            self._with_previous(activation=index)
            self._compute(TaskKind.FORWARD, index)
            self._with_next(activation=index)
        if steady:
            self._with_previous(activation=self._warmup)
        for index in range(steady):
            ahead = index + self._warmup
            self._compute(TaskKind.FORWARD, ahead)
            self._with_next(activation=ahead, gradient=index)
            self._compute(TaskKind.BACKWARD, index)
            following = ahead + 1 if index + 1 < steady else -1
            self._with_previous(activation=following, gradient=index)
        for index in range(steady, self._num_microbatches):
            self._with_next(gradient=index)
            self._compute(TaskKind.BACKWARD, index)
            self._with_previous(gradient=index)
        return tuple(self._items)

    def _compute(self, kind: TaskKind, microbatch: int) -> None:
        self._items.append(Pass(kind, self._stage, microbatch))

    def _with_previous(self, *, activation: int = -1, gradient: int = -1) -> None:
        self._exchange(self._stage - 1, activation, gradient)

    def _with_next(self, *, activation: int = -1, gradient: int = -1) -> None:
        self._exchange(self._stage, activation, gradient)

    def _exchange(self, boundary: int, activation: int, gradient: int) -> None:
        if not 0 <= boundary <= self._last_boundary:
            return
        messages = tuple(
            Message(boundary, microbatch, is_gradient)
            for microbatch, is_gradient in ((activation, False), (gradient, True))
            if microbatch >= 0
        )
        self._items += [Post(messages, is_blocking=True), Wait(messages)]
