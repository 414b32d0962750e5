"""Remaining work of a run: steps at each batch size, evaluations, saves.

The counts are those of Megatron-LM's training loop (``train`` and ``pretrain`` of core 0.16.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import ConfigError
from ..workload.config import Cadence


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLevel:
    """A global batch size, and the number of consumed samples from which it applies."""

    from_samples: int
    global_batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroup:
    """Consecutive steps of one global batch size; ``end`` is the first step after them."""

    begin: int
    end: int
    global_batch_size: int

    @property
    def num_steps(self) -> int:
        """Number of steps in the group."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingSchedule:
    """Remaining work after some steps."""

    groups: tuple[StepGroup, ...]
    num_evals: int
    """Number of evaluations, each of ``eval_iters`` passes, including those after the last step."""
    num_saves: int

    @property
    def num_steps(self) -> int:
        """Number of remaining steps."""
        return sum(group.num_steps for group in self.groups)


def ramp_levels(
    rampup: Sequence[int], global_batch_size: int, *, micro_batch_of_all: int = 1
) -> tuple[BatchLevel, ...]:
    """Return levels of ``--rampup-batch-size START INCREMENT SAMPLES``; one without a ramp.

    ``micro_batch_of_all`` is micro-batch size times data-parallel size: a batch is rounded down to
    multiples, as ``--decrease-batch-size-if-needed`` does (without it Megatron refuses to run).

    >>> [level.global_batch_size for level in ramp_levels((16, 16, 300), 64)]
    [16, 32, 48, 64]
    """
    whole = BatchLevel(from_samples=0, global_batch_size=global_batch_size)
    if len(rampup) != 3 or rampup[1] < 1 or rampup[0] >= global_batch_size:
        return (whole,)
    start, increment, samples = rampup
    count = (global_batch_size - start) // increment
    each = samples / count
    levels = [
        BatchLevel(
            from_samples=min(_least_with(number, each), samples + 1),
            global_batch_size=size // micro_batch_of_all * micro_batch_of_all or micro_batch_of_all,
        )
        for number, size in enumerate(range(start, start + count * increment + 1, increment))
    ]
    return tuple(levels)


def schedule_levels(schedule: str, *, seq_length: int) -> tuple[BatchLevel, ...]:
    """Return levels of ``--step-batch-size-schedule "TOKENS:SIZE …"`` (core 0.18 and later).

    K, M, B and T are powers of 1000; tokens become samples of ``seq_length``, rounded down.

    >>> [(x.from_samples, x.global_batch_size) for x in schedule_levels("0:8 1K:16", seq_length=10)]
    [(0, 8), (100, 16)]
    """
    rule = "{!r} in --step-batch-size-schedule is not a number; such as 0:768 250B:1536"
    pairs = (entry.partition(":")[::2] for entry in schedule.replace(",", " ").split())
    levels = [
        BatchLevel(
            from_samples=read_count(text, rule.format(text)) // seq_length,
            global_batch_size=read_count(size, rule.format(size)),
        )
        for text, size in pairs
    ]
    return tuple(sorted(levels, key=lambda level: level.from_samples))


def remaining_schedule(
    cadence: Cadence,
    levels: Sequence[BatchLevel],
    *,
    steps_done: int,
    steps_total: int,
    is_saving: bool,
) -> RemainingSchedule:
    """Return the remaining work of a run whose steps count from 0.

    A save is due every ``save_interval`` steps, when the batch size changes, and at the end.
    """
    groups = step_groups(steps_total, levels)
    remaining_groups = tuple(
        replace(group, begin=max(group.begin, steps_done))
        for group in groups
        if group.end > steps_done
    )
    is_going = steps_done < steps_total
    saves = {*_multiples(cadence.save_interval, steps_done, steps_total)}
    saves |= {steps_total} if is_going else set()
    changes = sum(group.begin > steps_done for group in groups)
    evals = len(_multiples(cadence.eval_interval, steps_done, steps_total))
    evals += is_going * cadence.num_final_evals
    return RemainingSchedule(
        groups=remaining_groups,
        num_evals=evals if cadence.eval_iters else 0,
        num_saves=len(saves) + changes if is_saving else 0,
    )


def step_groups(steps_total: int, levels: Sequence[BatchLevel]) -> tuple[StepGroup, ...]:
    """Return the whole run in groups of one batch size.

    >>> [g.num_steps for g in step_groups(100, ramp_levels((16, 16, 300), 64))]
    [7, 3, 2, 88]
    """
    groups: list[StepGroup] = []
    step = consumed = 0
    for level, after in zip(levels, [*levels[1:], None], strict=True):
        if step >= steps_total:
            break
        num_steps = steps_total - step
        if after is not None:
            missing = max(0, after.from_samples - consumed)
            num_steps = min(num_steps, math.ceil(missing / level.global_batch_size))
        if num_steps:
            groups.append(
                StepGroup(
                    begin=step, end=step + num_steps, global_batch_size=level.global_batch_size
                )
            )
        step += num_steps
        consumed += num_steps * level.global_batch_size
    return tuple(groups)


def _multiples(interval: int, done: int, total: int) -> range:
    """Return the remaining steps after which an event at this interval is due."""
    if interval <= 0:
        return range(0)
    return range((done // interval + 1) * interval, total + 1, interval)


def _least_with(number: int, each: float) -> int:
    """Return the least number of samples n with int(n / each) == number."""
    least = math.ceil(number * each)
    return least if int(least / each) >= number else least + 1


POWERS = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3))
"""Suffixes of a number, largest first."""


def read_count(text: str, rule: str) -> int:
    """Parse a number with an optional suffix; raises ``ConfigError`` with ``rule`` if invalid."""
    word = text.strip().upper()
    power = dict(POWERS).get(word[-1:], 1)
    try:
        return round(float(word[:-1] if power > 1 else word) * power)
    except (ValueError, OverflowError):
        raise ConfigError(rule) from None
