"""The operators that we model: identity, and the list of them that a layout runs.

The identity (kind, phase, shape) is the meeting point of what hooks record and what a layout
generates: both sides build ``Operator`` values, and equal values are the same work.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class OperatorKind(Enum):
    """What is computed.  The comment gives the canonical shape, sizes local to one rank."""

    EMBEDDING = "embedding"  # (tokens, hidden, vocab)
    NORM = "norm"  # (tokens, hidden)
    LINEAR_QKV = "linear_qkv"  # (tokens, in, out)
    POSITION = "position"  # (tokens, qkv width): rotary embedding, split and reshape of q, k, v
    CORE_ATTENTION = "core_attention"  # (micro_batch, heads, query_groups, seq, kv_channels)
    LINEAR_PROJ = "linear_proj"  # (tokens, in, out)
    RESIDUAL = "residual"  # (tokens, hidden): both bias-dropout-adds of a layer together
    LINEAR_FC1 = "linear_fc1"  # (tokens, in, out)
    ACTIVATION = "activation"  # (tokens, in, out): in = fc1's out, out = fc2's in
    LINEAR_FC2 = "linear_fc2"  # (tokens, in, out)
    LOGITS = "logits"  # (tokens, in, vocab)
    LOSS = "loss"  # (tokens, vocab): cross-entropy
    OPTIMIZER = "optimizer"  # (parameters,): those that this rank updates
    HOST_MICROBATCH = "host_microbatch"  # (): rest of one forward or backward of a stage
    HOST_STEP = "host_step"  # (): rest of one step

    @property
    def is_linear(self) -> bool:
        """True where the work is one matrix product per phase (two in the backward phase)."""
        return self in _LINEARS


_LINEARS = frozenset(
    {
        OperatorKind.LINEAR_QKV,
        OperatorKind.LINEAR_PROJ,
        OperatorKind.LINEAR_FC1,
        OperatorKind.LINEAR_FC2,
        OperatorKind.LOGITS,
    }
)


class Phase(Enum):
    """Which pass an operator runs in.  Backward is input and weight gradient together."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One piece of work on one rank."""

    kind: OperatorKind
    phase: Phase
    shape: tuple[int, ...]
    element_nbytes: int
