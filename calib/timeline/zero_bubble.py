"""Zero-bubble schedules H1 and H2: weight gradients put off to where a stage would idle.

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism" (2023, arXiv:2401.10241), section 2.  With
passes of equal length nothing idles in H2 between the first and the last pass of a stage, provided
that optimizers do not wait for each other.  The order does not depend on times: where a weight
gradient takes longer than the other passes, one that is searched for the times at hand does better.
"""

from __future__ import annotations

from ..workload.parallelism import Schedule
from .programs import Item, Message, Pass, Pipeline, Post, TaskKind, Wait


def zero_bubble_program(pipeline: Pipeline, stage: int) -> tuple[Item, ...]:
    """Program of ``stage`` under H1 or H2.

    Counting from 0 of p stages, stage i runs p - i forward passes before its first backward one
    and weight gradients i micro-batches late under H1; 2 (p - i) - 1 and 2 i under H2.  A message
    goes as soon as it is there, and the receiver is always ready for it.
    """
    return _Writer(pipeline, stage).build()


class _Writer:
    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        self._stage = stage
        self._last_stage = pipeline.num_stages - 1
        self._num_microbatches = m = pipeline.num_microbatches
        remaining = self._last_stage - stage
        is_h2 = pipeline.schedule is Schedule.ZERO_BUBBLE_H2
        self._warmup = min(m, 2 * remaining if is_h2 else remaining)
        self._delay = min(m, 2 * stage if is_h2 else stage)
        self._items: list[Item] = []

    def build(self) -> tuple[Item, ...]:
        m = self._num_microbatches
        self._post_receives()
        for index in range(self._warmup):
            self._forward(index)
        for index in range(m):
            if index + self._warmup < m:
                self._forward(index + self._warmup)
            self._input_gradient(index)
            if index >= self._delay:
                self._weight_gradient(index - self._delay)
        for index in range(m - self._delay, m):
            self._weight_gradient(index)
        return tuple(self._items)

    def _post_receives(self) -> None:
        messages = [
            message
            for index in range(self._num_microbatches)
            for message in (
                self._message(self._stage - 1, index, False),
                self._message(self._stage, index, True),
            )
            if message
        ]
        self._items.append(Post(tuple(messages), is_blocking=False))

    def _forward(self, microbatch: int) -> None:
        self._run(TaskKind.FORWARD, microbatch, self._stage - 1, self._stage)

    def _input_gradient(self, microbatch: int) -> None:
        self._run(TaskKind.INPUT_GRADIENT, microbatch, self._stage, self._stage - 1)

    def _weight_gradient(self, microbatch: int) -> None:
        self._items.append(Pass(TaskKind.WEIGHT_GRADIENT, self._stage, microbatch))

    def _run(self, kind: TaskKind, microbatch: int, source: int, target: int) -> None:
        is_gradient = kind is not TaskKind.FORWARD
        if received := self._message(source, microbatch, is_gradient):
            self._items.append(Wait((received,)))
        self._items.append(Pass(kind, self._stage, microbatch))
        if sent := self._message(target, microbatch, is_gradient):
            self._items.append(Post((sent,), is_blocking=False))

    def _message(self, boundary: int, microbatch: int, is_gradient: bool) -> Message | None:
        if not 0 <= boundary < self._last_stage:
            return None
        return Message(boundary, microbatch, is_gradient)
