"""The order in which each stage computes and exchanges: 1F1B as Megatron runs it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..errors import ConfigError


class TaskKind(Enum):
    """What a stage does next."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EXCHANGE = "exchange"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One entry of a stage's program.

    An exchange at ``boundary`` i joins stages i and i + 1 and carries the activation of one
    micro-batch down, the gradient of one up, or both at once (-1: none).
    """

    kind: TaskKind
    microbatch: int = -1
    boundary: int = -1
    activation: int = -1
    gradient: int = -1


def num_warmup(num_stages: int, num_microbatches: int, stage: int) -> int:
    """Forward passes before the first backward one.

    >>> [num_warmup(4, 8, stage) for stage in range(4)]
    [3, 2, 1, 0]
    """
    return min(num_stages - stage - 1, num_microbatches)


def stage_program(
    num_stages: int, num_microbatches: int, stage: int, *, num_virtual_stages: int = 1
) -> tuple[Task, ...]:
    """Program of ``stage``: warm-up, one forward one backward, cool-down.

    Follows ``forward_backward_pipelining_without_interleaving`` of ``megatron.core`` 0.16.1, where
    a send and the receive that follows it are one batch.  With one stage: forward and
    backward of each micro-batch in turn.  Raises ``ConfigError`` for interleaved stages.
    """
    if num_virtual_stages > 1:
        raise ConfigError(
            f"vp {num_virtual_stages}: interleaved schedules are not modelled yet; set vp 1"
        )
    return _Program(num_stages, num_microbatches, stage).build()


class _Program:
    """Writes the tasks of one stage; neighbours that are not there cost nothing."""

    def __init__(self, num_stages: int, num_microbatches: int, stage: int) -> None:
        self._stage = stage
        self._is_first = stage == 0
        self._is_last = stage == num_stages - 1
        self._warmup = num_warmup(num_stages, num_microbatches, stage)
        self._steady = num_microbatches - self._warmup
        self._tasks: list[Task] = []

    def build(self) -> tuple[Task, ...]:
        for index in range(self._warmup):
            self._with_previous(activation=index)
            self._compute(TaskKind.FORWARD, index)
            self._with_next(activation=index)
        if self._steady:
            self._with_previous(activation=self._warmup)
        for index in range(self._steady):
            ahead = index + self._warmup
            self._compute(TaskKind.FORWARD, ahead)
            self._with_next(activation=ahead, gradient=index)
            self._compute(TaskKind.BACKWARD, index)
            following = ahead + 1 if index + 1 < self._steady else -1
            self._with_previous(activation=following, gradient=index)
        for index in range(self._steady, self._steady + self._warmup):
            self._with_next(gradient=index)
            self._compute(TaskKind.BACKWARD, index)
            self._with_previous(gradient=index)
        return tuple(self._tasks)

    def _compute(self, kind: TaskKind, microbatch: int) -> None:
        self._tasks.append(Task(kind=kind, microbatch=microbatch))

    def _with_previous(self, *, activation: int = -1, gradient: int = -1) -> None:
        if not self._is_first:
            self._exchange(self._stage - 1, activation, gradient)

    def _with_next(self, *, activation: int = -1, gradient: int = -1) -> None:
        if not self._is_last:
            self._exchange(self._stage, activation, gradient)

    def _exchange(self, boundary: int, activation: int, gradient: int) -> None:
        self._tasks.append(
            Task(
                kind=TaskKind.EXCHANGE, boundary=boundary, activation=activation, gradient=gradient
            )
        )
