"""What the methods of torch's ``ProcessGroup`` transfer: collective, bytes, role of the group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...calib.workload.collectives import Collective, GroupRole

_ROLES = {
    "TENSOR_MODEL_PARALLEL_GROUP": GroupRole.TP,
    "PIPELINE_MODEL_PARALLEL_GROUP": GroupRole.PP,
    "DATA_PARALLEL_GROUP": GroupRole.DP,
    "DATA_PARALLEL_GROUP_WITH_CP": GroupRole.DP,
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": GroupRole.DP,
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP": GroupRole.DP,
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": GroupRole.DP,
    "EXPERT_MODEL_PARALLEL_GROUP": GroupRole.EP,
    "EXPERT_TENSOR_PARALLEL_GROUP": GroupRole.EXPERT_TP,
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": GroupRole.EXPERT_TP_EP,
    "EXPERT_DATA_PARALLEL_GROUP": GroupRole.EXPERT_DP,
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1": GroupRole.DP_INSTANCES,
    "CONTEXT_PARALLEL_GROUP": GroupRole.CP,
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0": GroupRole.EXPERT_DP,
    "EMBEDDING_GROUP": GroupRole.EMBEDDING,
    "POSITION_EMBEDDING_GROUP": GroupRole.EMBEDDING,
    "MODEL_PARALLEL_GROUP": GroupRole.MODEL,
    "default_pg": GroupRole.WORLD,
    "undefined": GroupRole.WORLD,
    "": GroupRole.WORLD,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """How one method is counted: ``nbytes`` reads its arguments, ``peer`` is the rank's place."""

    collective: Collective
    nbytes: Callable[[tuple[Any, ...]], int]
    peer: int | None = None


def role_of(description: str) -> GroupRole:
    """What a group is for, from its ``group_desc``; Megatron names all of its groups.

    >>> role_of("DATA_PARALLEL_GROUP_WITH_CP").value
    'dp'
    """
    return _ROLES.get(description, GroupRole.OTHER)


def tensor_nbytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists; 0 for anything else."""
    if isinstance(value, (list, tuple)):
        return sum(tensor_nbytes(item) for item in value)
    try:
        return value.numel() * value.element_size()
    except AttributeError:
        return 0


def _argument(position: int) -> Callable[[tuple[Any, ...]], int]:
    def nbytes(args: tuple[Any, ...]) -> int:
        return tensor_nbytes(args[position]) if len(args) > position else 0

    return nbytes


def _nothing(args: tuple[Any, ...]) -> int:
    return 0


def _payload(collective: Collective, position: int | None, peer: int | None = None) -> Payload:
    nbytes = _nothing if position is None else _argument(position)
    return Payload(collective=collective, nbytes=nbytes, peer=peer)


_OUTPUT, _INPUT = 0, 1
_GATHER = _payload(Collective.ALL_GATHER, _OUTPUT)
_SCATTER = _payload(Collective.REDUCE_SCATTER, _INPUT)
_EXCHANGE = _payload(Collective.ALL_TO_ALL, _INPUT)
_REDUCE = _payload(Collective.ALL_REDUCE, 0)
_BARRIER = _payload(Collective.OTHER, None)

# torch 2.13 renamed the single-tensor methods; the old names are bindings of the same work.
PAYLOADS: Mapping[str, Payload] = {
    "allreduce": _REDUCE,
    "allreduce_coalesced": _REDUCE,
    "broadcast": _payload(Collective.BROADCAST, 0),
    "allgather": _GATHER,
    "allgather_coalesced": _GATHER,
    "_allgather_base": _GATHER,
    "all_gather_single": _GATHER,
    "allgather_into_tensor_coalesced": _GATHER,
    "all_gather_single_coalesced": _GATHER,
    "reduce_scatter": _SCATTER,
    "_reduce_scatter_base": _SCATTER,
    "reduce_scatter_single": _SCATTER,
    "reduce_scatter_tensor_coalesced": _SCATTER,
    "reduce_scatter_single_coalesced": _SCATTER,
    "alltoall": _EXCHANGE,
    "alltoall_base": _EXCHANGE,
    "all_to_all_single": _EXCHANGE,
    "send": _payload(Collective.SEND, 0, peer=1),
    "recv": _payload(Collective.RECV, 0, peer=1),
    "recv_anysource": _payload(Collective.RECV, 0),
    "reduce": _payload(Collective.OTHER, 0),
    "gather": _payload(Collective.OTHER, _INPUT),
    "scatter": _payload(Collective.OTHER, _OUTPUT),
    "barrier": _BARRIER,
    "monitored_barrier": _BARRIER,
}
