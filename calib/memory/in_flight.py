"""Forward passes whose activations a stage holds at once, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..workload.parallelism import SCHEDULES, Schedule

Counts = tuple[int, ...]
"""Micro-batches held of each chunk of a stage, in model order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """The largest sets of micro-batches that a stage holds: none contains another."""

    peaks: tuple[Counts, ...]
    after_last_chunk: tuple[Counts, ...]
    """The same among the moments right after a forward pass of the stage's last chunk."""

    @property
    def most(self) -> int:
        """Most forward passes held at once, over all chunks."""
        return max(sum(counts) for counts in self.peaks)


# A planner asks for the stages of the same pipelines again and again.
@lru_cache(maxsize=65536)
def in_flight(
    *,
    num_stages: int,
    num_virtual_stages: int,
    num_microbatches: int,
    group_size: int,
    schedule: Schedule,
    stage: int,
) -> InFlight:
    """What a stage holds under each schedule.

    Interleaved chunks are counted in Megatron's own order.

    >>> common = dict(num_microbatches=8, group_size=4, schedule=Schedule.ONE_F_ONE_B)
    >>> [in_flight(num_stages=4, num_virtual_stages=1, stage=s, **common).most for s in range(4)]
    [4, 3, 2, 1]
    >>> [in_flight(num_stages=4, num_virtual_stages=2, stage=s, **common).most for s in range(4)]
    [11, 9, 7, 5]
    """
    if num_virtual_stages > 1:
        return _interleaved(num_stages, num_virtual_stages, num_microbatches, group_size, stage)
    held = ((SCHEDULES[schedule].most_held(num_stages, stage, num_microbatches),),)
    return InFlight(peaks=held, after_last_chunk=held)


def _interleaved(
    num_stages: int, num_chunks: int, num_microbatches: int, group: int, stage: int
) -> InFlight:
    """Counts along ``forward_backward_pipelining_with_interleaving`` of ``megatron.core`` 0.16.1.

    Warm-up is 2 (p - stage - 1) + (v - 1) x group passes.  The order repeats with every group, so
    that the groups of warm-up and two more show every peak.
    """
    warmup = 2 * (num_stages - stage - 1) + (num_chunks - 1) * group
    num_groups = -(-warmup // (group * num_chunks)) + 2
    num_microbatches = min(num_microbatches, num_groups * group)
    order = _chunk_order(num_chunks, num_microbatches, group)
    held = [0] * num_chunks
    peaks: set[Counts] = set()
    after_last: set[Counts] = set()
    for index, chunk in enumerate(order):
        held[chunk] += 1
        if index + 1 >= min(warmup, len(order)):
            peaks.add(tuple(held))
        if chunk == num_chunks - 1:
            after_last.add(tuple(held))
        if index >= warmup:
            held[num_chunks - 1 - order[index - warmup]] -= 1
    return InFlight(peaks=_maximal(peaks), after_last_chunk=_maximal(after_last))


def _chunk_order(num_chunks: int, num_microbatches: int, group: int) -> list[int]:
    """Chunk of each forward pass: a group of micro-batches through every chunk, then the next."""
    return [
        chunk
        for begin in range(0, num_microbatches, group)
        for chunk in range(num_chunks)
        for _ in range(min(group, num_microbatches - begin))
    ]


def _maximal(found: set[Counts]) -> tuple[Counts, ...]:
    return tuple(
        sorted(
            one
            for one in found
            if not any(
                other != one and all(a <= b for a, b in zip(one, other, strict=True))
                for other in found
            )
        )
    )
