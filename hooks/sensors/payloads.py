"""What the methods of torch's ``ProcessGroup`` transfer: collective, bytes, role of the group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...calib.workload.collectives import Collective, GroupRole

_ROLES = {
    "TENSOR_MODEL_PARALLEL_GROUP": GroupRole.TP,
    "PIPELINE_MODEL_PARALLEL_GROUP": GroupRole.PP,
    "DATA_PARALLEL_GROUP": GroupRole.DP,
    "DATA_PARALLEL_GROUP_WITH_CP": GroupRole.DP,
    "DATA_PARALLEL_GROUP_WITH_CP_AG": GroupRole.DP,
    "DATA_PARALLEL_GROUP_WITH_GTP_REMAT": GroupRole.DP,
    "DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": GroupRole.DP,
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": GroupRole.DP,
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP": GroupRole.DP,
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": GroupRole.DP,
    "EXPERT_MODEL_PARALLEL_GROUP": GroupRole.EP,
    "EXPERT_TENSOR_PARALLEL_GROUP": GroupRole.EXPERT_TP,
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": GroupRole.EXPERT_TP_EP,
    "EXPERT_DATA_PARALLEL_GROUP": GroupRole.EXPERT_DP,
    "EXPERT_DATA_PARALLEL_GROUP_AG": GroupRole.EXPERT_DP,
    "EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": GroupRole.EXPERT_DP,
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1": GroupRole.DP_INSTANCES,
    "CONTEXT_PARALLEL_GROUP": GroupRole.CP,
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0": GroupRole.EXPERT_DP,
    "EMBEDDING_GROUP": GroupRole.EMBEDDING,
    "POSITION_EMBEDDING_GROUP": GroupRole.EMBEDDING,
    "MODEL_PARALLEL_GROUP": GroupRole.MODEL,
    "default_pg": GroupRole.WORLD,
}
_UNDESCRIBED = frozenset({"", "undefined"})


@dataclass(frozen=True, slots=True)
class Payload:
    """How one method is counted: the place of the tensors that count, and that of the peer.

    With ``other`` the larger of two sides counts: a rank to which more is sent than it sends is as
    long at it.
    """

    collective: Collective
    place: int | None
    peer: int | None = None
    other: int | None = None

    def nbytes(self, args: tuple[Any, ...]) -> int:
        """Bytes of the payload of one call."""
        if self.place is None or len(args) <= self.place:
            return 0
        nbytes = tensor_nbytes(args[self.place])
        if self.other is None or len(args) <= self.other:
            return nbytes
        return max(nbytes, tensor_nbytes(args[self.other]))


def role_of(description: str) -> GroupRole:
    """What a group is for, from its ``group_desc``; Megatron names all of its groups.

    >>> role_of("DATA_PARALLEL_GROUP_WITH_CP").value
    'dp'
    """
    return _ROLES.get(description, GroupRole.OTHER)


def is_described(description: str) -> bool:
    """False for what torch says of a group that was made without a description."""
    return description not in _UNDESCRIBED


def tensor_nbytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists; 0 for anything else."""
    if isinstance(value, (list, tuple)):
        return sum(tensor_nbytes(item) for item in value)
    try:
        return value.numel() * value.element_size()
    except AttributeError:
        return 0


_OUTPUT, _INPUT = 0, 1
_GATHER = Payload(Collective.ALL_GATHER, _OUTPUT)
_SCATTER = Payload(Collective.REDUCE_SCATTER, _INPUT)
_EXCHANGE = Payload(Collective.ALL_TO_ALL, _INPUT, other=_OUTPUT)
_REDUCE = Payload(Collective.ALL_REDUCE, 0)
_BARRIER = Payload(Collective.OTHER, None)

# torch 2.13 renamed the single-tensor methods; the old names are bindings of the same work.
PAYLOADS: Mapping[str, Payload] = {
    "allreduce": _REDUCE,
    "allreduce_coalesced": _REDUCE,
    "broadcast": Payload(Collective.BROADCAST, 0),
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
    "send": Payload(Collective.SEND, 0, peer=1),
    "recv": Payload(Collective.RECV, 0, peer=1),
    "recv_anysource": Payload(Collective.RECV, 0),
    "reduce": Payload(Collective.OTHER, 0),
    "gather": Payload(Collective.OTHER, _INPUT),
    "scatter": Payload(Collective.OTHER, _OUTPUT),
    "barrier": _BARRIER,
    "monitored_barrier": _BARRIER,
}
