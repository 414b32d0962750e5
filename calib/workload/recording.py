"""Who records: one data-parallel replica over all stages; everyone else sends a summary.

A pure function of the world's size and the layout, so that all ranks know it without talking.  The
replica is the last one: it holds the last rank, beside which the companion runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from .collectives import GroupRole
from .parallelism import Parallelism
from .ranks import Position, group, rank_at

SMALL_WORLD = 8
"""Ranks up to which everyone records everything, for as long as there is room."""
WHOLE_NBYTES = 32 << 20
"""A small world's file up to which windows are written whole, as they come."""
PACKED_NBYTES = 32 << 20
"""What the windows after that may take together, each packed and at most half of what is left."""
MAX_MEMBERS = 1024
"""Ranks outside the replica that record their share of its groups."""
MAX_GROUP = 128
"""Ranks of one data-parallel group that do so; of a larger one as many, evenly spread."""
FILES_NBYTES = 56 << 20
"""All files of recording ranks together, over the whole run."""
SUMMARIES_NBYTES = 8 << 20
"""The one file with the summaries of the others."""
MESSAGE_NBYTES = 64 << 10
"""What a rank sends in a window."""
# A recorder of the replica writes passes and every collective, one outside it those of few groups.
# Twice the weight leaves half of the room to each of the latter, which are then cut off earlier.
_REPLICA_WEIGHT = 8
# Accelerators of a usual node; read only where no layout is known.
_NODE = 8
_SHARDED = (GroupRole.DP, GroupRole.DP_INSTANCES, GroupRole.EXPERT_DP)


class Recorded(Enum):
    """What a rank records of a hooked step."""

    OPERATORS = "operators"
    """Everything."""
    TRANSFERS = "transfers"
    """Phases and collectives: its operators are those of another rank."""
    GROUPS = "groups"
    """Collectives of the groups that it shares with the replica."""
    WATCH = "watch"
    """No file: one summary per window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingPlan:
    """Part and bounds of every rank; ``parts`` has those that write a file."""

    world_size: int
    parts: Mapping[int, Recorded]

    @property
    def is_small(self) -> bool:
        """True where everyone records everything and nothing is sent."""
        return self.world_size <= SMALL_WORLD

    @property
    def recorders(self) -> tuple[int, ...]:
        """Ranks that write a file, ascending."""
        return tuple(sorted(self.parts))

    @property
    def replica(self) -> frozenset[int]:
        """Ranks that record all their phases and collectives."""
        return frozenset(rank for rank, part in self.parts.items() if part is not Recorded.GROUPS)

    def part(self, rank: int) -> Recorded:
        """What ``rank`` records."""
        return self.parts.get(rank, Recorded.WATCH)

    def file_nbytes(self, rank: int) -> int | None:
        """Bytes that the file of ``rank`` may have over the whole run; None: any number."""
        if self.is_small:
            return None
        weights = {r: _weight(part) for r, part in self.parts.items()}
        return FILES_NBYTES * weights.get(rank, 0) // sum(weights.values())


def recording_plan(world_size: int, parallelism: Parallelism | None = None) -> RecordingPlan:
    """Who records in a world of that size; without a layout, its first and its last node.

    >>> plan = recording_plan(16384, Parallelism(tp=8, pp=16, dp=128))
    >>> len(plan.replica), len(plan.recorders), plan.part(0), plan.part(16383)
    (128, 255, <Recorded.WATCH: 'watch'>, <Recorded.OPERATORS: 'operators'>)
    """
    if world_size <= SMALL_WORLD:
        parts = dict.fromkeys(range(world_size), Recorded.OPERATORS)
    elif parallelism is None or parallelism.num_ranks != world_size:
        ends = (*range(_NODE), *range(max(_NODE, world_size - _NODE), world_size))
        parts = dict.fromkeys(ends, Recorded.OPERATORS)
    else:
        parts = _replica(parallelism)
        for rank in _members(parallelism, tuple(parts)):
            # A rank of the replica keeps its larger part.
            parts.setdefault(rank, Recorded.GROUPS)
    return RecordingPlan(world_size=world_size, parts=parts)


def _replica(par: Parallelism) -> dict[int, Recorded]:
    """The last replica; the first and the last rank of each stage time operators."""
    parts = {}
    for stage in range(par.pp):
        for cp_rank in range(par.cp):
            for tp_rank in range(par.tp):
                place = Position(tp_rank=tp_rank, cp_rank=cp_rank, dp_rank=par.dp - 1, stage=stage)
                is_end = (tp_rank, cp_rank) in ((0, 0), (par.tp - 1, par.cp - 1))
                parts[rank_at(par, place)] = Recorded.OPERATORS if is_end else Recorded.TRANSFERS
    return parts


def _members(par: Parallelism, replica: tuple[int, ...]) -> Iterator[int]:
    """Ranks outside the replica, at most ``MAX_MEMBERS``, the groups that say most first.

    The data-parallel groups of the last rank give the minimum over a group; an all-to-all is seen
    whole where the whole expert-parallel group records.
    """
    known, last = set(replica), par.num_ranks - 1
    found = [_spread(group(par, role, last)) for role in _SHARDED]
    groups = _expert_groups(par, replica) if par.ep > 1 else iter(())
    num_left = MAX_MEMBERS
    for ranks in (*found, *groups):
        # A group counts only whole: with one member missing its minimum is no transfer time.
        new = [rank for rank in ranks if rank not in known]
        if len(new) > num_left:
            continue
        num_left -= len(new)
        known.update(new)
        yield from new


def _expert_groups(par: Parallelism, replica: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The expert-parallel groups of the replica, those of the last stage first."""
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


def _weight(part: Recorded) -> int:
    return 1 if part is Recorded.GROUPS else _REPLICA_WEIGHT
