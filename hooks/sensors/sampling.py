"""Of which micro-batches the operators are recorded: few in each step, all over a window."""

from __future__ import annotations

from ...calib.timeline.interleaved import schedule_table
from ...calib.timeline.programs import Pipeline
from ...calib.workload.config import RunConfig

MAX_STRIDE = 8


def pass_microbatches(config: RunConfig) -> tuple[int, ...]:
    """Micro-batch of every forward pass of a stage in its order, the same for backward passes.

    The same on all ranks, which therefore record the same micro-batches.
    """
    if config.parallelism.vp == 1:
        return tuple(range(config.num_microbatches))
    table = schedule_table(
        Pipeline(
            num_stages=config.parallelism.pp,
            num_microbatches=config.num_microbatches,
            num_virtual_stages=config.parallelism.vp,
            microbatch_group_size=config.parallelism.microbatch_group_size,
        )
    )
    return tuple(place.microbatch for place in table)


def sampling_stride(num_microbatches: int) -> int:
    """Distance between the micro-batches of a step whose operators are timed.

    >>> [sampling_stride(n) for n in (0, 1, 2, 4, 8, 64)]
    [1, 1, 2, 4, 8, 8]
    """
    return max(1, min(num_microbatches, MAX_STRIDE))


def samples(microbatches: tuple[int, ...], num_hooked: int) -> tuple[int, ...]:
    """Micro-batch of each pass, -1 where it is not recorded, in the hooked step of that number.

    Whole micro-batches, so that an operator without time is one that did not run; the choice
    rotates.  Empty where all are recorded, or the passes are not known.

    >>> samples((0, 1, 2, 3), 0), samples((0, 1, 2, 3), 1)
    ((0, -1, -1, -1), (-1, 1, -1, -1))
    """
    stride = sampling_stride(1 + max(microbatches, default=-1))
    if stride == 1:
        return ()
    first = num_hooked % stride
    return tuple(number if number % stride == first else -1 for number in microbatches)
