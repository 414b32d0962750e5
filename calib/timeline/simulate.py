"""Exact earliest-start times of a pipeline schedule, for many cost vectors at once.

An exchange is blocking on both ends, as Megatron's batched point-to-point is without interleaving:
it starts when both stages have arrived, and both are held until it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .schedules import Task, TaskKind, stage_program

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """Seconds per micro-batch; stages (or boundaries) first, alternatives second.

    ``start_s`` is when a stage may begin.  A boundary moves an activation in ``activation_s``, a
    gradient in ``gradient_s``, and both at once in ``both_s``.
    """

    forward_s: Floats
    backward_s: Floats
    activation_s: Floats
    gradient_s: Floats
    both_s: Floats
    start_s: Floats

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return int(self.forward_s.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Times in seconds, shape (stages, alternatives), from the start of the step."""

    end_s: Floats
    """When a stage has finished its last task."""
    compute_s: Floats
    transfer_s: Floats
    """Held by exchanges, without the wait for the other end."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One task of one stage in the simulated step."""

    stage: int
    kind: TaskKind
    microbatch: int
    start_s: float
    end_s: float


def pipeline_costs(
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    *,
    activation_s: ArrayLike = 0.0,
    gradient_s: ArrayLike = 0.0,
    both_s: ArrayLike | None = None,
    start_s: ArrayLike = 0.0,
) -> PipelineCosts:
    """Costs from per-stage values; a single column where alternatives are not given.

    Exchanges may be scalars; ``both_s`` is the longer of the two directions where left out.
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
        start_s=_shaped(start_s, shape),
    )


def joined(many: Sequence[PipelineCosts]) -> PipelineCosts:
    """Alternatives of equal numbers of stages side by side, for one simulation of all."""
    names = PipelineCosts.__dataclass_fields__
    return PipelineCosts(
        **{name: np.concatenate([getattr(costs, name) for costs in many], axis=1) for name in names}
    )


def simulate(costs: PipelineCosts, num_microbatches: int) -> Simulation:
    """Earliest-start times of 1F1B over the stages of ``costs``.

    With equal stages and free exchanges the makespan is (m + p - 1)(f + b):

    >>> simulate(pipeline_costs([1.0] * 4, [2.0] * 4), 8).makespan_s.tolist()
    [33.0]
    """
    end = _run(costs, num_microbatches, None)
    compute = num_microbatches * (costs.forward_s + costs.backward_s)
    transfer = np.zeros_like(compute)
    for (boundary, direction), count in _exchange_counts(costs.num_stages, num_microbatches):
        held = count * _direction_cost(costs, direction)[boundary]
        transfer[boundary] += held
        transfer[boundary + 1] += held
    return Simulation(end_s=end, compute_s=compute, transfer_s=transfer)


def spans(costs: PipelineCosts, num_microbatches: int, *, column: int = 0) -> tuple[Span, ...]:
    """Every task of one alternative with its times; exchanges appear on both stages."""
    out: list[Span] = []

    def note(stage: int, task: Task, start_s: Floats, end_s: Floats) -> None:
        microbatch = task.microbatch if task.boundary < 0 else max(task.activation, task.gradient)
        out.append(
            Span(
                stage=stage,
                kind=task.kind,
                microbatch=microbatch,
                start_s=float(start_s[column]),
                end_s=float(end_s[column]),
            )
        )

    _run(costs, num_microbatches, note)
    return tuple(sorted(out, key=lambda s: (s.start_s, s.stage, s.end_s)))


_Note = Callable[[int, Task, Floats, Floats], None]


def _run(costs: PipelineCosts, num_microbatches: int, note: _Note | None) -> Floats:
    ready = [row.copy() for row in costs.start_s]
    for stage, task in _event_order(costs.num_stages, num_microbatches):
        if task.kind is TaskKind.EXCHANGE:
            start = np.maximum(ready[stage], ready[stage + 1])
            end = start + _direction_cost(costs, _direction(task))[stage]
            ready[stage] = ready[stage + 1] = end
            if note is not None:
                note(stage, task, start, end)
                note(stage + 1, task, start, end)
            continue
        is_forward = task.kind is TaskKind.FORWARD
        start = ready[stage]
        ready[stage] = start + (costs.forward_s if is_forward else costs.backward_s)[stage]
        if note is not None:
            note(stage, task, start, ready[stage])
    return np.array(ready)


class _Direction(Enum):
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    BOTH = "both"


def _direction(task: Task) -> _Direction:
    if task.gradient < 0:
        return _Direction.ACTIVATION
    return _Direction.GRADIENT if task.activation < 0 else _Direction.BOTH


def _direction_cost(costs: PipelineCosts, direction: _Direction) -> Floats:
    if direction is _Direction.ACTIVATION:
        return costs.activation_s
    return costs.gradient_s if direction is _Direction.GRADIENT else costs.both_s


@lru_cache(maxsize=64)
def _exchange_counts(
    num_stages: int, num_microbatches: int
) -> tuple[tuple[tuple[int, _Direction], int], ...]:
    order = _event_order(num_stages, num_microbatches)
    return tuple(
        Counter(
            (stage, _direction(task)) for stage, task in order if task.kind is TaskKind.EXCHANGE
        ).items()
    )


@lru_cache(maxsize=64)
def _event_order(num_stages: int, num_microbatches: int) -> tuple[tuple[int, Task], ...]:
    """All tasks, each after its inputs; an exchange appears once, on its upper stage."""
    programs = [stage_program(num_stages, num_microbatches, s) for s in range(num_stages)]
    places = [0] * num_stages
    order: list[tuple[int, Task]] = []
    total = sum(len(program) for program in programs)
    while sum(places) < total:
        before = sum(places)
        for stage, program in enumerate(programs):
            while places[stage] < len(program):
                task = program[places[stage]]
                if task.kind is not TaskKind.EXCHANGE:
                    order.append((stage, task))
                    places[stage] += 1
                elif task.boundary == stage - 1 and _meets(programs, places, stage - 1, task):
                    order.append((stage - 1, task))
                    places[stage - 1] += 1
                    places[stage] += 1
                else:
                    break
        assert sum(places) > before, "the programs of two stages do not meet"
    return tuple(order)


def _meets(programs: list[tuple[Task, ...]], places: list[int], upper: int, task: Task) -> bool:
    return places[upper] < len(programs[upper]) and programs[upper][places[upper]] == task


def _columns(values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    return array[:, np.newaxis] if array.ndim == 1 else array


def _shaped(values: ArrayLike, shape: tuple[int, ...]) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 1:
        array = array[:, np.newaxis]
    return np.broadcast_to(array, shape)
