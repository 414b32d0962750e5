"""Overlap of transfers with work: single ones, and those of sharded weights and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..layers.blocks import EXPERT_KINDS, LAYER_KINDS, BlockKind
from ..layers.recompute import RecomputeOption
from ..memory.activations import expert_tensors, layer_tensors, offloaded_nbytes, stashed_nbytes
from ..workload.collectives import Collective, CollectiveUse, GroupRole, Placement
from ..workload.config import RunConfig
from ..workload.operators import Operator, OperatorCount, OperatorKind, Phase
from .items import Floats, ItemIndex, SparseRows, Sums

_DATA = frozenset({GroupRole.DP, GroupRole.DP_INSTANCES, GroupRole.EXPERT_DP})
"""Roles whose transfers within a pass are those of sharded weights and gradients."""
_OPEN = {"open forward": Placement.FORWARD, "open backward": Placement.BACKWARD}


def exposed_part(transfer_s: Floats, window_s: Floats, contention: float | Floats) -> Floats:
    """Return the part of a transfer not hidden by work of ``window_s``; overlap slows both.

    This is Galvatron's rule (Miao et al. 2022, section 3.3), bounded by running both in sequence.

    >>> one, two = np.array([1.0]), np.array([2.0])
    >>> exposed_part(one, two, 1.0).tolist(), exposed_part(two, one, 1.0).tolist()
    ([0.0], [1.0])
    """
    together = np.minimum(transfer_s, window_s)
    slower = np.maximum(transfer_s, window_s) + (contention - 1) * together
    return np.minimum(slower - window_s, transfer_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardTimes:
    """Transfers of sharded weights and gradients, shape (blocks, alternatives) each.

    FSDP gathers the weights of the next block, and reduces the gradients of the previous one, while
    a block computes: among equal blocks each transfer hides behind the block's own pass.
    """

    gather_s: Floats
    """Gathers before the forward pass."""
    backward_s: Floats
    """Gathers before the backward pass and reductions after it."""
    reduce_s: Floats
    """Reductions after the backward pass alone."""
    open_s: dict[Placement, Floats]
    """Transfers that a run does not overlap, by pass; not included in the others."""
    contention: float | Floats
    is_host_only: bool

    def exposed(self, placement: Placement, pass_s: Floats) -> Floats:
        """Return the time that they add to a pass of ``pass_s``."""
        total_s = self.gather_s if placement is Placement.FORWARD else self.backward_s
        if not self.is_host_only:
            total_s = exposed_part(total_s, pass_s, self.contention)
        return total_s + self.open_s[placement]

    def edge(self, placement: Placement, pass_s: Floats) -> Floats:
        """Return the hidden part of the first gather, or of the last reduction."""
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
        """Return times from those of the items, shape (items, alternatives)."""
        return ShardTimes(
            gather_s=self.gather @ times_s,
            backward_s=self.backward @ times_s,
            reduce_s=self.reduce @ times_s,
            open_s={placement: rows @ times_s for placement, rows in self.open.items()},
            contention=contention,
            is_host_only=is_host_only,
        )


class ShardWriter:
    """Builds ``ShardSums`` transfer by transfer."""

    def __init__(self, index: ItemIndex) -> None:
        self._index = index
        self._rows = {name: Sums() for name in ("gather", "backward", "reduce", *_OPEN)}
        self._is_empty = True

    def add(self, row: int, use: CollectiveUse) -> None:
        """Add one transfer of the block of a row."""
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
        """Return the matrices of all added transfers, by blocks; None if there were none."""
        if self._is_empty:
            return None
        matrices = {name: rows.matrix(num_rows=num_rows) for name, rows in self._rows.items()}
        return ShardSums(
            gather=matrices["gather"],
            backward=matrices["backward"],
            reduce=matrices["reduce"],
            open={placement: matrices[name] for name, placement in _OPEN.items()},
        )


def block_copies(config: RunConfig, kind: BlockKind) -> tuple[OperatorCount, ...]:
    """Return the copies of activations during the passes of a block, forward and backward.

    These are copies to the host's memory and back, and into pages and out of them, which read and
    write each byte.
    """
    experts = config.model.experts
    is_copied = config.offload_modules or (experts is not None and experts.stash_factor)
    if not is_copied or kind not in LAYER_KINDS or config.device == "cpu":
        return ()
    has_experts, width = kind in EXPERT_KINDS, config.precision.nbytes
    recomputed_parts = RecomputeOption.from_config(config).parts
    away = round(offloaded_nbytes(config, layer_tensors(config, kind), recomputed_parts))
    copies: list[tuple[OperatorKind, tuple[int, ...], int]] = []
    if away:
        copies.append((OperatorKind.HOST_COPY, (away,), 1))
    tensors = expert_tensors(config) if has_experts else ()
    stashed = round(stashed_nbytes(config, tensors, recomputed_parts) / width)
    if stashed:
        copies.append((OperatorKind.PERMUTE, (1, stashed, 1), width))
    return tuple(
        (Operator(kind=kind, phase=phase, shape=shape, element_nbytes=nbytes), 1)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
        for kind, shape, nbytes in copies
    )


def is_shard(use: CollectiveUse) -> bool:
    """Return True for a transfer of sharded weights or gradients within a pass."""
    return use.call.role in _DATA
