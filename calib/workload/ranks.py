"""Which rank sits where: Megatron's order tp-cp-ep-dp-pp, the first varying fastest."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from .collectives import GroupRole
from .config import Parallelism


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Place of a rank in the layout; ``stage`` is its rank within the pipeline."""

    tp_rank: int
    dp_rank: int
    stage: int


def position(parallelism: Parallelism, rank: int) -> Position:
    """Place of a global rank.

    >>> position(Parallelism(tp=2, dp=2, pp=2), 5)
    Position(tp_rank=1, dp_rank=0, stage=1)
    """
    if not 0 <= rank < parallelism.num_ranks:
        raise ConfigError(
            f"rank {rank} is not in a layout of {parallelism.num_ranks} ranks; "
            f"choose from 0 to {parallelism.num_ranks - 1}"
        )
    rest, tp_rank = divmod(rank, parallelism.tp)
    stage, dp_rank = divmod(rest, parallelism.dp)
    return Position(tp_rank=tp_rank, dp_rank=dp_rank, stage=stage)


def rank_at(parallelism: Parallelism, place: Position) -> int:
    """Global rank at a place: the inverse of ``position``."""
    return place.tp_rank + parallelism.tp * (place.dp_rank + parallelism.dp * place.stage)


def group(parallelism: Parallelism, role: GroupRole, rank: int) -> tuple[int, ...]:
    """Global ranks of the group with that role to which ``rank`` belongs.

    ``EMBEDDING`` is empty for the ranks of middle stages.

    >>> group(Parallelism(tp=2, dp=2, pp=2), GroupRole.DP, 5)
    (5, 7)
    """
    place = position(parallelism, rank)
    tp_ranks, dp_ranks, stages = (place.tp_rank,), (place.dp_rank,), (place.stage,)
    last = parallelism.pp - 1
    if role in (GroupRole.TP, GroupRole.MODEL, GroupRole.WORLD):
        tp_ranks = tuple(range(parallelism.tp))
    if role in (GroupRole.DP, GroupRole.WORLD):
        dp_ranks = tuple(range(parallelism.dp))
    if role in (GroupRole.PP, GroupRole.MODEL, GroupRole.WORLD):
        stages = tuple(range(parallelism.pp))
    if role is GroupRole.EMBEDDING:
        stages = tuple(sorted({0, last})) if place.stage in (0, last) else ()
    if role is GroupRole.OTHER:
        raise ConfigError("role 'other' has no fixed group; ask for tp, pp, dp, embedding or model")
    return tuple(
        rank_at(parallelism, Position(tp_rank=t, dp_rank=d, stage=s))
        for s in stages
        for d in dp_ranks
        for t in tp_ranks
    )
