"""One parameter tensor of one rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTensor:
    """One parameter of one rank: its elements, and how its gradient is treated."""

    name: str
    numel: int
    is_sequence_parallel: bool = False
    """Replicated over tp, but with a gradient of a part of the sequence only."""
    is_shared_embedding: bool = False
    """Held by the first and the last stage, whose gradients are summed."""
    is_expert: bool = False
    """Split over the expert groups: its gradient is reduced among the replicas of the expert."""
