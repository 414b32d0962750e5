"""Collectives: their identity, and their placement in a step."""

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
    """Purpose of a process group; the hooks derive it from Megatron's ``group_desc``."""

    TP = "tp"
    CP = "cp"
    PP = "pp"
    DP = "dp"
    """Group that reduces gradients: data- and context-parallel ranks together, within one instance
    of the distributed optimizer."""
    DP_INSTANCES = "dp_instances"
    """Ranks with the same shard in every instance of the distributed optimizer."""
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
    """Nodes that the group spans."""
    num_chosen: int = 0
    """Experts per token, if an all-to-all sends a token once to each node and forwards it there
    (DeepEP, HybridEP), with ``nbytes`` counting a token once per receiving rank; 0 if every byte
    goes directly to its peer."""


class Placement(QuickEnum):
    """Place of a collective in the step; the first five run once per micro-batch."""

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
        """True if the collective is issued for every micro-batch."""
        return self not in (Placement.GRAD_REDUCE, Placement.GRAD_FINISH, Placement.PARAM_GATHER)


class OtherPass(QuickEnum):
    """Part of another micro-batch's opposite pass in the same layer that overlaps a transfer."""

    NONE = "none"
    INPUTS = "inputs"
    """All but weight gradients."""
    WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """A collective with its placement; ``count`` is per micro-batch or per step accordingly."""

    call: CollectiveCall
    count: int
    placement: Placement
    is_overlapped: bool = False
    """Issued asynchronously: only the part that other work does not hide is exposed."""
    overlaps_with: OperatorKind | None = None
    """Operator of the same pass that overlaps the transfer.

    The backward phase of a linear has two products, each with its own overlapping transfer.
    """
    overlapping_operators: tuple[tuple[OperatorKind, tuple[int, ...]], ...] = ()
    """Operators of the same pass, by kind and shape, that together overlap all transfers with the
    same value."""
    other_pass: OtherPass = OtherPass.NONE
