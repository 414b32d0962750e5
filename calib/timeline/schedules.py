"""The order in which each stage computes and exchanges, schedule by schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..workload.parallelism import Schedule
from .interleaved import interleaved_program
from .programs import Item, Message, Pass, Pipeline, Post, TaskKind, Wait, passes
from .zero_bubble import zero_bubble_program


def num_warmup(num_stages: int, num_microbatches: int, stage: int) -> int:
    """Forward passes before the first backward one, without interleaving.

    >>> [num_warmup(4, 8, stage) for stage in range(4)]
    [3, 2, 1, 0]
    """
    return min(num_stages - stage - 1, num_microbatches)


def stage_program(pipeline: Pipeline, stage: int) -> tuple[Item, ...]:
    """Everything that ``stage`` does in a step, in order."""
    return PROGRAMS[pipeline.schedule](pipeline, stage)


def peak_in_flight(pipeline: Pipeline, stage: int) -> int:
    """Most forward passes of ``stage`` whose activations are held at once, one chunk each.

    A weight gradient that waits keeps its input too.

    >>> [peak_in_flight(Pipeline(num_stages=4, num_microbatches=8), stage) for stage in range(4)]
    [4, 3, 2, 1]
    """
    last = TaskKind.WEIGHT_GRADIENT if pipeline.splits_backward else TaskKind.BACKWARD
    held = peak = 0
    for task in passes(stage_program(pipeline, stage)):
        held += (task.kind is TaskKind.FORWARD) - (task.kind is last)
        peak = max(peak, held)
    return peak


class _Blocking:
    """Writes a program in which a stage waits for each batch of messages as it posts it.

    Follows ``forward_backward_no_pipelining`` and ``_pipelining_without_interleaving`` of
    ``megatron.core`` 0.16.1.  Neighbours that are not there cost nothing.
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


def _one_f_one_b(pipeline: Pipeline, stage: int) -> tuple[Item, ...]:
    if pipeline.num_virtual_stages > 1:
        return interleaved_program(pipeline, stage)
    return _Blocking(pipeline, stage).one_forward_one_backward()


PROGRAMS: Mapping[Schedule, Callable[[Pipeline, int], tuple[Item, ...]]] = {
    Schedule.ONE_F_ONE_B: _one_f_one_b,
    Schedule.ZERO_BUBBLE_H1: zero_bubble_program,
    Schedule.ZERO_BUBBLE_H2: zero_bubble_program,
}
"""Who writes what a stage does in turn; docs/extending/schedule.md adds one."""
