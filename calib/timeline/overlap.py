"""What hides behind work: one transfer, and those of weights and gradients that are sharded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..layers import Again, BlockKind
from ..memory import expert_tensors, layer_tensors, offloaded_nbytes, stashed_nbytes
from ..workload import (
    Collective,
    CollectiveUse,
    GroupRole,
    Operator,
    OperatorCount,
    OperatorKind,
    Phase,
    Placement,
    RunConfig,
)
from .items import Floats, ItemIndex, SparseRows, Sums

_DATA = frozenset({GroupRole.DP, GroupRole.DP_INSTANCES, GroupRole.EXPERT_DP})
"""Roles whose transfers within a pass are those of sharded weights and gradients."""
_OPEN = {"open forward": Placement.FORWARD, "open backward": Placement.BACKWARD}


def beyond(transfer_s: Floats, window_s: Floats, contention: float | Floats) -> Floats:
    """Exposed part of a transfer beside work of ``window_s``; side by side both are slower.

    Galvatron's rule (Miao et al. 2022, section 3.3); never more than one after the other.

    >>> one, two = np.array([1.0]), np.array([2.0])
    >>> beyond(one, two, 1.0).tolist(), beyond(two, one, 1.0).tolist()
    ([0.0], [1.0])
    """
    together = np.minimum(transfer_s, window_s)
    slower = np.maximum(transfer_s, window_s) + (contention - 1) * together
    return np.minimum(slower - window_s, transfer_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardTimes:
    """Transfers of sharded weights and gradients, shape (blocks, alternatives) each.

    FSDP fetches the weights of the next block, and reduces the gradients of the last one, while a
    block computes: among blocks that are alike each hides behind its own pass.
    """

    gather_s: Floats
    """Before the forward pass."""
    backward_s: Floats
    """Gathers before the backward pass and reductions after it."""
    reduce_s: Floats
    """The second of these alone."""
    open_s: dict[Placement, Floats]
    """What a run does not overlap, by pass; not in the others."""
    contention: float | Floats
    is_host_only: bool

    def exposed(self, placement: Placement, pass_s: Floats) -> Floats:
        """What they add to a pass of ``pass_s``."""
        total_s = self.gather_s if placement is Placement.FORWARD else self.backward_s
        if not self.is_host_only:
            total_s = beyond(total_s, pass_s, self.contention)
        return total_s + self.open_s[placement]

    def edge(self, placement: Placement, pass_s: Floats) -> Floats:
        """Hidden part of the first gather, or of the last reduction."""
        if self.is_host_only:
            return 0 * pass_s
        lone_s = self.gather_s if placement is Placement.FORWARD else self.reduce_s
        return np.minimum(lone_s, pass_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardSums:
    """The sums behind ``ShardTimes``, as matrices over items; rows are blocks."""

    gather: SparseRows
    backward: SparseRows
    reduce: SparseRows
    open: dict[Placement, SparseRows]

    def times(
        self, times_s: Floats, *, contention: float | Floats, is_host_only: bool
    ) -> ShardTimes:
        """Times from those of the items, shape (items, alternatives)."""
        return ShardTimes(
            gather_s=self.gather @ times_s,
            backward_s=self.backward @ times_s,
            reduce_s=self.reduce @ times_s,
            open_s={placement: rows @ times_s for placement, rows in self.open.items()},
            contention=contention,
            is_host_only=is_host_only,
        )


class ShardWriter:
    """Writes ``ShardSums`` transfer by transfer."""

    def __init__(self, index: ItemIndex) -> None:
        self._index = index
        self._rows = {name: Sums() for name in ("gather", "backward", "reduce", *_OPEN)}
        self._is_empty = True

    def add(self, row: int, use: CollectiveUse) -> None:
        """One transfer of the block of a row."""
        self._is_empty = False
        is_forward = use.placement is Placement.FORWARD
        names = ["gather" if is_forward else "backward"]
        if not use.is_overlapped:
            names = [name for name, placement in _OPEN.items() if placement is use.placement]
        elif not is_forward and use.call.collective is not Collective.ALL_GATHER:
            names.append("reduce")
        for name in names:
            self._rows[name].add(row, self._index.place(use.call), use.count)

    def sums(self, num_rows: int) -> ShardSums | None:
        """All that was added, by blocks; None where it was nothing."""
        if self._is_empty:
            return None
        found = {name: rows.matrix(num_rows=num_rows) for name, rows in self._rows.items()}
        return ShardSums(
            gather=found["gather"],
            backward=found["backward"],
            reduce=found["reduce"],
            open={placement: found[name] for name, placement in _OPEN.items()},
        )


def block_copies(config: RunConfig, kind: BlockKind) -> tuple[OperatorCount, ...]:
    """Copies of activations beside the passes of a block, forward and backward.

    To the host's memory and back; into pages and out of them, which reads and writes each byte.
    """
    experts = config.model.experts
    is_copied = config.offload_modules or (experts is not None and experts.stash_factor)
    is_layer = kind in (BlockKind.LAYER, BlockKind.EXPERT_LAYER)
    if not is_copied or not is_layer or config.device == "cpu":
        return ()
    has_experts, width = kind is BlockKind.EXPERT_LAYER, config.precision.nbytes
    again = Again.own(config).parts
    away = round(offloaded_nbytes(config, layer_tensors(config, has_experts=has_experts), again))
    found: list[tuple[OperatorKind, tuple[int, ...], int]] = []
    if away:
        found.append((OperatorKind.HOST_COPY, (away,), 1))
    tensors = expert_tensors(config) if has_experts else ()
    stashed = round(stashed_nbytes(config, tensors, again) / width)
    if stashed:
        found.append((OperatorKind.PERMUTE, (1, stashed, 1), width))
    return tuple(
        (Operator(kind=kind, phase=phase, shape=shape, element_nbytes=nbytes), 1)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
        for kind, shape, nbytes in found
    )


def is_shard(use: CollectiveUse) -> bool:
    """True for a transfer of sharded weights or gradients within a pass."""
    return use.call.role in _DATA
