"""The collectives of a step: identity, and the list of them that a layout issues."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Collective(Enum):
    """A transfer among the ranks of a group; ``nbytes`` is counted as nccl-tests does."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"
    RECV = "recv"
    OTHER = "other"


class GroupRole(Enum):
    """What a process group is for; the hooks derive it from Megatron's ``group_desc``."""

    TP = "tp"
    PP = "pp"
    DP = "dp"
    EMBEDDING = "embedding"
    MODEL = "model"
    WORLD = "world"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One collective as one rank issues it.

    ``nbytes`` is the payload of the whole group as nccl-tests counts it: the reduced buffer for
    all-reduce, the gathered buffer for all-gather and reduce-scatter, the message for send/recv.
    """

    collective: Collective
    role: GroupRole
    num_ranks: int
    nbytes: int
