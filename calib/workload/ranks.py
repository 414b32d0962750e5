"""Placement of ranks: Megatron's order tp-cp-ep-dp-pp, the first varying fastest.

The order is that of ``RankGenerator`` and ``initialize_model_parallel`` of ``megatron.core``
0.16.1.  Experts order the same ranks as tp-ep-dp-pp, with separate sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ..errors import ConfigError
from .collectives import Collective, CollectiveCall, GroupRole
from .config import Parallelism, RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Place of a rank in the layout; ``stage`` is its rank within the pipeline."""

    tp_rank: int
    dp_rank: int
    stage: int
    cp_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """Sizes of the axes that ranks are counted over, the first varying fastest."""

    sizes: Mapping[str, int]

    def places(self, rank: int) -> dict[str, int]:
        out: dict[str, int] = {}
        for name, size in self.sizes.items():
            rank, out[name] = divmod(rank, size)
        return out

    def rank(self, places: Mapping[str, int]) -> int:
        stride, rank = 1, 0
        for name, size in self.sizes.items():
            rank += places[name] * stride
            stride *= size
        return rank


_ROLE_AXES: Mapping[GroupRole, frozenset[str]] = {
    GroupRole.TP: frozenset({"tp"}),
    GroupRole.CP: frozenset({"cp"}),
    GroupRole.DP: frozenset({"dp", "cp"}),
    GroupRole.PP: frozenset({"pp"}),
    GroupRole.MODEL: frozenset({"tp", "pp"}),
    GroupRole.WORLD: frozenset({"tp", "cp", "dp", "pp"}),
    GroupRole.EMBEDDING: frozenset({"pp"}),
    GroupRole.EXPERT_TP: frozenset({"etp"}),
    GroupRole.EP: frozenset({"ep"}),
    GroupRole.EXPERT_TP_EP: frozenset({"etp", "ep"}),
    GroupRole.EXPERT_DP: frozenset({"expert_dp"}),
    GroupRole.DP_INSTANCES: frozenset({"expert_dp"}),
}
_SHARDED = frozenset({GroupRole.DP, GroupRole.EXPERT_DP, GroupRole.DP_INSTANCES})
"""Roles whose groups are split if the distributed optimizer has several instances."""


def position(parallelism: Parallelism, rank: int) -> Position:
    """Return the place of a global rank.

    >>> position(Parallelism(tp=2, dp=2, pp=2), 5)
    Position(tp_rank=1, dp_rank=0, stage=1, cp_rank=0)
    """
    if not 0 <= rank < parallelism.num_ranks:
        raise ConfigError(
            f"rank {rank} is not in a layout of {parallelism.num_ranks} ranks; "
            f"choose from 0 to {parallelism.num_ranks - 1}"
        )
    places = _dense(parallelism).places(rank)
    return Position(
        tp_rank=places["tp"], dp_rank=places["dp"], stage=places["pp"], cp_rank=places["cp"]
    )


def rank_at(parallelism: Parallelism, place: Position) -> int:
    """Return the global rank at a place: the inverse of ``position``."""
    places = {"tp": place.tp_rank, "cp": place.cp_rank, "dp": place.dp_rank, "pp": place.stage}
    return _dense(parallelism).rank(places)


@lru_cache(maxsize=4096)
def group(parallelism: Parallelism, role: GroupRole, rank: int) -> tuple[int, ...]:
    """Return the global ranks of the group with that role to which ``rank`` belongs.

    ``DP`` and ``EXPERT_DP`` are the groups that reduce gradients, context-parallel ranks included;
    with several instances of the distributed optimizer they lie within one, and ``DP_INSTANCES``
    connects the instances.  ``EMBEDDING`` is empty for the ranks of middle stages.

    >>> group(Parallelism(tp=2, dp=2, pp=2), GroupRole.DP, 5)
    (5, 7)
    """
    axes = _ROLE_AXES.get(role)
    if axes is None:
        raise ConfigError("role 'other' has no fixed group; ask for tp, pp, dp, embedding or model")
    place = position(parallelism, rank)
    order = _dense(parallelism)
    if not axes <= set(order.sizes):
        order = _expert(parallelism)
    members = _members(order, axes, rank)
    if role is GroupRole.EMBEDDING:
        last = parallelism.pp - 1
        return tuple(sorted({members[0], members[last]})) if place.stage in (0, last) else ()
    if role not in _SHARDED:
        return members
    # Instances split the group in the order of its ranks (``initialize_model_parallel``).
    size = len(members) // parallelism.num_optimizer_instances
    instance, shard = divmod(members.index(rank), size)
    if role is GroupRole.DP_INSTANCES:
        return members[shard::size]
    return members[instance * size : (instance + 1) * size]


def num_nodes(parallelism: Parallelism, role: GroupRole) -> int:
    """Return the number of nodes that the first group of a role spans; 1 if ranks per node are
    unknown.

    >>> num_nodes(Parallelism(tp=4, dp=4, ranks_per_node=8), GroupRole.DP)
    2
    """
    return _reach(parallelism, role)[1]


# A plan requests these two numbers for each of its thousands of layouts.
@lru_cache(maxsize=65536)
def _reach(parallelism: Parallelism, role: GroupRole) -> tuple[int, int]:
    """Return the numbers of ranks and nodes of the first group of a role."""
    ranks = group(parallelism, role, 0)
    per_node = parallelism.ranks_per_node
    return len(ranks), len({rank // per_node for rank in ranks}) if per_node else 1


def group_call(
    config: RunConfig, collective: Collective, role: GroupRole, nbytes: int
) -> CollectiveCall:
    """Return a collective over the whole group of a role."""
    num_ranks, nodes = _reach(config.parallelism, role)
    return CollectiveCall(
        collective=collective,
        role=role,
        num_ranks=num_ranks,
        nbytes=nbytes,
        num_nodes=nodes,
    )


def _members(order: _Order, axes: frozenset[str], rank: int) -> tuple[int, ...]:
    """Return every rank that differs from ``rank`` only in those axes, in the order of ranks."""
    places = order.places(rank)
    ranks = [order.rank({name: 0 if name in axes else place for name, place in places.items()})]
    stride = 1
    for name, size in order.sizes.items():
        if name in axes:
            ranks = [first + step * stride for step in range(size) for first in ranks]
        stride *= size
    return tuple(ranks)


def _dense(par: Parallelism) -> _Order:
    return _order(par, {"tp": par.tp, "cp": par.cp}, {"dp": par.dp})


def _expert(par: Parallelism) -> _Order:
    return _order(par, {"etp": par.expert_tp, "ep": par.ep}, {"expert_dp": par.expert_dp})


def _order(par: Parallelism, inner: dict[str, int], data: dict[str, int]) -> _Order:
    pipeline = {"pp": par.pp}
    outer = {**pipeline, **data} if par.is_pipeline_before_data else {**data, **pipeline}
    return _Order(sizes={**inner, **outer})
