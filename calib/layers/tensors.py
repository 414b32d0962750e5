"""Parameter tensors of one rank, and sums over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTensor:
    """One parameter of one rank: its elements, and how its gradient is reduced."""

    name: str
    numel: int
    is_sequence_parallel: bool = False
    """Replicated over tp; each rank's gradient covers only its part of the sequence."""
    is_head_parallel: bool = False
    """Replicated over tp; each rank's gradient covers only its part of the heads."""
    is_shared_embedding: bool = False
    """Present on the first and the last stage, whose gradients are summed."""
    is_expert: bool = False
    """Split over the expert groups; its gradient is reduced among the replicas of the expert."""
    is_quantized: bool = False
    """Stored in 8 bits if the layout stores weights in 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNumel:
    """Elements of a block's parameters on one rank, summed by how gradients are reduced."""

    dense: int
    """All but the experts."""
    expert: int
    sequence_parallel: int
    head_parallel: int


def block_numel(tensors: Iterable[ParameterTensor]) -> BlockNumel:
    """Sum the tensors of a block."""
    kinds: Counter[str] = Counter()
    for tensor in tensors:
        kinds["expert" if tensor.is_expert else "dense"] += tensor.numel
        if tensor.is_sequence_parallel:
            kinds["sequence_parallel"] += tensor.numel
        elif tensor.is_head_parallel:
            kinds["head_parallel"] += tensor.numel
    return BlockNumel(**{name: kinds[name] for name in BlockNumel.__slots__})


START_ALIGNMENT = 64
"""Elements to whose multiples the distributed optimizer aligns the start of a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Consecutive parameters of a block in one gradient buffer, last first."""

    parts: tuple[tuple[int, bool], ...]
    """Elements of each parameter, and True for a shared embedding."""
    has_shared_embedding: bool
    numel: int
    """Elements without padding."""
    aligned_numel: int
    """Elements if each parameter begins on ``START_ALIGNMENT`` and the last is padded as well."""

    @property
    def aligned_end(self) -> int:
        """End of a strip that begins aligned; its last parameter is not padded."""
        return self.aligned_numel - -self.parts[-1][0] % START_ALIGNMENT


def strip(tensors: Sequence[ParameterTensor]) -> Strip:
    """Return the strip of tensors given first to last."""
    parts = tuple((tensor.numel, tensor.is_shared_embedding) for tensor in reversed(tensors))
    return Strip(
        parts=parts,
        has_shared_embedding=any(is_shared for _, is_shared in parts),
        numel=sum(numel for numel, _ in parts),
        aligned_numel=sum(-(-numel // START_ALIGNMENT) * START_ALIGNMENT for numel, _ in parts),
    )
