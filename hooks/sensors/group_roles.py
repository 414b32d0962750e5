"""What the groups of a process are for: told, by their descriptions, or by the ranks in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ...calib.errors import ConfigError
from ...calib.workload.collectives import Collective, GroupRole
from ...calib.workload.config import Parallelism
from ...calib.workload.ranks import group as ranks_of
from .payloads import is_described, role_of

_EXCHANGES = (GroupRole.EP, GroupRole.EXPERT_TP_EP, GroupRole.CP)
_BETWEEN_STAGES = (GroupRole.PP, GroupRole.CP)
_DENSE = (GroupRole.TP, GroupRole.CP, GroupRole.DP, GroupRole.EMBEDDING, GroupRole.PP)
_OTHERS = (
    *(GroupRole.MODEL, GroupRole.DP_INSTANCES, GroupRole.EXPERT_TP, GroupRole.EP),
    *(GroupRole.EXPERT_TP_EP, GroupRole.EXPERT_DP, GroupRole.WORLD),
)
_FIRST: Mapping[Collective, tuple[GroupRole, ...]] = {
    Collective.ALL_TO_ALL: _EXCHANGES,
    Collective.SEND: _BETWEEN_STAGES,
    Collective.RECV: _BETWEEN_STAGES,
}
"""Of groups with the same ranks, those that are used so; of the rest the dense ones come first."""


class GroupRoles:
    """The roles of groups, in the process that has them.

    ``told`` says some by name.  A group without a description is known by its ranks where the
    layout is known and nothing names any group: Megatron's own have descriptions, unless somebody
    has made them in its place; then those without are the user's.
    """

    def __init__(
        self,
        told: Mapping[str, GroupRole] | None = None,
        parallelism: Parallelism | None = None,
    ) -> None:
        self._told = told or {}
        self._parallelism = parallelism
        self._is_nameless: bool | None = None

    def of(
        self, group: Any, ranks: Sequence[int], collective: Collective | None = None
    ) -> GroupRole:
        """What a group is for, or what a collective on it is."""
        told = self._told.get(group.group_name)
        if told is not None:
            return told
        description = group.group_desc
        if is_described(description):
            return role_of(description)
        is_whole = len(ranks) == dist.get_world_size()
        if self._parallelism is not None and self._has_no_names():
            found = role_by_ranks(self._parallelism, dist.get_rank(), ranks, collective)
            if found is not GroupRole.OTHER:
                return found
        return GroupRole.WORLD if is_whole else GroupRole.OTHER

    def _has_no_names(self) -> bool:
        if self._is_nameless is None:
            known = dist.distributed_c10d._world.pg_map
            names = (getattr(group, "group_desc", "") for group in known)
            is_named = any(role_of(name) not in _NAMELESS for name in names)
            self._is_nameless = not (self._told or is_named)
        return self._is_nameless


_NAMELESS = (GroupRole.WORLD, GroupRole.OTHER)


def role_by_ranks(
    parallelism: Parallelism,
    rank: int,
    ranks: Sequence[int],
    collective: Collective | None = None,
) -> GroupRole:
    """The role of the group of ``rank`` that has these ranks; ``OTHER`` where none has.

    >>> role_by_ranks(Parallelism(tp=2, dp=2, pp=2), 5, (5, 7)).value
    'dp'
    >>> role_by_ranks(Parallelism(tp=2, dp=2, pp=2), 5, (1, 5), Collective.SEND).value
    'pp'
    """
    wanted = tuple(sorted(ranks))
    first = _FIRST.get(collective, ()) if collective is not None else ()
    for role in (*first, *_DENSE, *_OTHERS):
        try:
            found = ranks_of(parallelism, role, rank)
        except ConfigError:
            return GroupRole.OTHER  # another number of ranks than the layout has
        if len(wanted) > 1 and tuple(sorted(found)) == wanted:
            return role
    return GroupRole.OTHER
