"""What a collective is: its identity, and its place in a step."""

from __future__ import annotations

from dataclasses import dataclass

from .argument_values import QuickEnum
from .operators import OperatorKind


class Collective(QuickEnum):
    """A transfer among the ranks of a group; ``nbytes`` is counted as nccl-tests does."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"
    RECV = "recv"
    OTHER = "other"


class GroupRole(QuickEnum):
    """What a process group is for; the hooks derive it from Megatron's ``group_desc``."""

    TP = "tp"
    CP = "cp"
    PP = "pp"
    DP = "dp"
    """Reduces gradients: data- and context-parallel ranks together, within one instance of the
    distributed optimizer."""
    DP_INSTANCES = "dp_instances"
    """The same shard of every instance of the distributed optimizer."""
    EXPERT_TP = "expert_tp"
    EP = "ep"
    EXPERT_TP_EP = "expert_tp_ep"
    EXPERT_DP = "expert_dp"
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
    num_nodes: int = 1
    """Nodes that the group reaches over."""
    num_chosen: int = 0
    """Experts of each token, where an all-to-all sends a token once to each node and passes it on
    there (DeepEP, HybridEP); 0 where every byte travels to its own peer.  ``nbytes`` then counts a
    token once for each rank that gets it."""


class Placement(QuickEnum):
    """Where in the step a collective runs; the first five once per micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    PIPELINE_FORWARD = "pipeline_forward"
    PIPELINE_BACKWARD = "pipeline_backward"
    GRAD_REDUCE = "grad_reduce"
    GRAD_FINISH = "grad_finish"
    """After the last backward pass, before the optimizer."""
    PARAM_GATHER = "param_gather"

    @property
    def is_per_microbatch(self) -> bool:
        """True where the collective is issued again for every micro-batch."""
        return self not in (Placement.GRAD_REDUCE, Placement.GRAD_FINISH, Placement.PARAM_GATHER)


class OtherPass(QuickEnum):
    """What a transfer runs beside of the opposite pass of another micro-batch in the same layer."""

    NONE = "none"
    INPUTS = "inputs"
    """All but the gradients of weights."""
    WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """A collective with its place; ``count`` is per micro-batch or per step as placed."""

    call: CollectiveCall
    count: int
    placement: Placement
    is_overlapped: bool = False
    """Issued asynchronously: only what does not fit behind other work is exposed."""
    overlaps_with: OperatorKind | None = None
    """The operator of the same pass beside which the transfer runs.

    The backward phase of a linear has two products, each with a transfer of its own beside it.
    """
    beside: tuple[tuple[OperatorKind, tuple[int, ...]], ...] = ()
    """Operators of the same pass, by kind and shape, beside which all transfers run that name the
    same."""
    other_pass: OtherPass = OtherPass.NONE
