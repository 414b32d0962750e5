"""Recording plan: one data-parallel replica records, over all stages; other ranks send a summary.

The plan is a pure function of world size and layout, so that ranks need not communicate about it.
The replica is the last one, since the companion runs next to the last rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from .collectives import GroupRole
from .parallelism import Parallelism
from .ranks import Position, group, rank_at

SMALL_WORLD = 8
"""Largest world in which every rank records everything, within the size limits."""
WHOLE_NBYTES = 32 << 20
"""File size in a small world up to which windows are written whole, as they come."""
PACKED_NBYTES = 32 << 20
"""Budget of all later windows, each packed and at most half of the remaining budget."""
MAX_MEMBERS = 1024
"""Most ranks outside the replica that record the groups that they share with it."""
MAX_GROUP = 128
"""Most such ranks of one data-parallel group, evenly spread over it."""
FILES_NBYTES = 256 << 20
"""Budget of all files of recording ranks, over the whole run."""
SUMMARIES_NBYTES = 8 << 20
"""Budget of the one file with the summaries of the other ranks."""
MESSAGE_NBYTES = 4 << 10
"""Most bytes that a rank sends in a window."""
# A rank of the replica writes passes and every collective, one outside it those of few groups.
# With twice this weight, the latter would have half the bytes each and be cut off earlier.
_REPLICA_WEIGHT = 8
# Accelerators of a usual node, used only if no layout is known.
_NODE = 8
_SHARDED = (GroupRole.DP, GroupRole.DP_INSTANCES, GroupRole.EXPERT_DP)


class RecordingDetail(Enum):
    """Part of a hooked step that a rank records."""

    OPERATORS = "operators"
    """Everything."""
    TRANSFERS = "transfers"
    """Phases and collectives; another rank records the same operators."""
    GROUPS = "groups"
    """Collectives of the groups that the rank shares with the replica."""
    WATCH = "watch"
    """No file; one summary per window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingPlan:
    """Recorded part and file size limit of every rank; ``parts``: ranks that write a file."""

    world_size: int
    parts: Mapping[int, RecordingDetail]

    @property
    def is_small(self) -> bool:
        """True if every rank records everything and no summaries are sent."""
        return self.world_size <= SMALL_WORLD

    @property
    def recorders(self) -> tuple[int, ...]:
        """Ranks that write a file, ascending."""
        return tuple(sorted(self.parts))

    @property
    def replica(self) -> frozenset[int]:
        """Ranks that record all their phases and collectives."""
        return frozenset(
            rank for rank, part in self.parts.items() if part is not RecordingDetail.GROUPS
        )

    def part(self, rank: int) -> RecordingDetail:
        """Return the part that ``rank`` records."""
        return self.parts.get(rank, RecordingDetail.WATCH)

    def file_nbytes(self, rank: int) -> int | None:
        """Return the byte limit of the file of ``rank`` over the whole run; None: unlimited."""
        if self.is_small:
            return None
        weights = {r: _weight(part) for r, part in self.parts.items()}
        return FILES_NBYTES * weights.get(rank, 0) // sum(weights.values())


def recording_plan(world_size: int, parallelism: Parallelism | None = None) -> RecordingPlan:
    """Return the plan for a world of that size; without a layout, its first and last node record.

    >>> plan = recording_plan(16384, Parallelism(tp=8, pp=16, dp=128))
    >>> len(plan.replica), len(plan.recorders), plan.part(0), plan.part(16383)
    (128, 255, <RecordingDetail.WATCH: 'watch'>, <RecordingDetail.OPERATORS: 'operators'>)
    """
    if world_size <= SMALL_WORLD:
        parts = dict.fromkeys(range(world_size), RecordingDetail.OPERATORS)
    elif parallelism is None or parallelism.num_ranks != world_size:
        ends = (*range(_NODE), *range(max(_NODE, world_size - _NODE), world_size))
        parts = dict.fromkeys(ends, RecordingDetail.OPERATORS)
    else:
        parts = _replica(parallelism)
        for rank in _members(parallelism, tuple(parts)):
            # A rank of the replica already has a larger part.
            parts.setdefault(rank, RecordingDetail.GROUPS)
    return RecordingPlan(world_size=world_size, parts=parts)


def _replica(par: Parallelism) -> dict[int, RecordingDetail]:
    """Return the parts of the last replica; first and last rank of each stage time operators."""
    parts = {}
    for stage in range(par.pp):
        for cp_rank in range(par.cp):
            for tp_rank in range(par.tp):
                place = Position(tp_rank=tp_rank, cp_rank=cp_rank, dp_rank=par.dp - 1, stage=stage)
                is_end = (tp_rank, cp_rank) in ((0, 0), (par.tp - 1, par.cp - 1))
                parts[rank_at(par, place)] = (
                    RecordingDetail.OPERATORS if is_end else RecordingDetail.TRANSFERS
                )
    return parts


def _members(par: Parallelism, replica: tuple[int, ...]) -> Iterator[int]:
    """Yield ranks outside the replica, at most ``MAX_MEMBERS``, the most informative groups first.

    The data-parallel groups of the last rank give the minimum over a group; an all-to-all is
    complete if the whole expert-parallel group records.
    """
    known, last = set(replica), par.num_ranks - 1
    sharded_groups = [_spread(group(par, role, last)) for role in _SHARDED]
    groups = _expert_groups(par, replica) if par.ep > 1 else iter(())
    num_remaining = MAX_MEMBERS
    for ranks in (*sharded_groups, *groups):
        # Only complete groups are useful: with a member missing, the minimum is no transfer time.
        new = [rank for rank in ranks if rank not in known]
        if len(new) > num_remaining:
            continue
        num_remaining -= len(new)
        known.update(new)
        yield from new


def _expert_groups(par: Parallelism, replica: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the expert-parallel groups of the replica, those of the last stage first."""
    seen: set[int] = set()
    for rank in sorted(replica, reverse=True):
        if rank not in seen:
            ranks = group(par, GroupRole.EXPERT_TP_EP, rank)
            seen.update(ranks)
            yield ranks


def _spread(ranks: tuple[int, ...]) -> tuple[int, ...]:
    if len(ranks) <= MAX_GROUP:
        return ranks
    return tuple(ranks[i * len(ranks) // MAX_GROUP] for i in range(MAX_GROUP))


def _weight(part: RecordingDetail) -> int:
    return 1 if part is RecordingDetail.GROUPS else _REPLICA_WEIGHT
