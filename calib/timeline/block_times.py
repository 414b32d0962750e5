"""Passes of blocks as sums over their operators and transfers, with what overlaps taken off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..layers.blocks import Block
from ..workload.collectives import CollectiveUse, Placement
from ..workload.operators import OperatorKind, Phase
from .items import PASS_PARTS, Floats, ItemIndex, Part, SparseRows, Sums, part_of

_WEIGHT_FRAC = 0.5
"""Two products of one size: half, where no trace says more."""
_PASSES = (Placement.FORWARD, Placement.BACKWARD, Placement.RECOMPUTE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockTimes:
    """Seconds of one micro-batch in each block, shape (blocks, alternatives)."""

    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    """Part of ``backward_s`` that only weights wait for: a second product of each linear."""
    recompute_s: Floats
    transfer_s: dict[tuple[Placement, Part], Floats]
    """Exposed transfers by pass and part."""

    @property
    def forward_pass_s(self) -> Floats:
        """Operators and transfers of the forward pass."""
        return self.forward_s + self._transfers(Placement.FORWARD)

    @property
    def backward_pass_s(self) -> Floats:
        """Operators and transfers of the backward pass, recomputation included."""
        transfers = self._transfers(Placement.BACKWARD) + self._transfers(Placement.RECOMPUTE)
        return self.backward_s + self.recompute_s + transfers

    def part_s(self, part: Part) -> Floats:
        """Exposed transfers of one part in both passes."""
        return sum((self.transfer_s[place, part] for place in _PASSES), 0 * self.forward_s)

    def _transfers(self, place: Placement) -> Floats:
        return sum((self.transfer_s[place, part] for part in PASS_PARTS), 0 * self.forward_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockSums:
    """The sums as matrices over items; transfers that share a window are one row of ``uses``."""

    forward: SparseRows
    backward: SparseRows
    weight: SparseRows
    recompute: SparseRows
    uses: SparseRows
    windows: SparseRows
    """Work that each row of ``uses`` may hide behind; empty where it does not overlap."""
    homes: dict[tuple[Placement, Part], SparseRows]
    """Which rows of ``uses`` each block adds up, by pass and part."""

    def times(
        self, times_s: Floats, *, contention: float | Floats, is_host_only: bool
    ) -> BlockTimes:
        """Times of the blocks from those of the items, shape (items, alternatives).

        On a device without streams of its own (``is_host_only``) nothing hides: the transfer uses
        the cores that compute.  Elsewhere a transfer that hides behind work slows both by
        ``contention``.
        """
        exposed = self.uses @ times_s
        if not is_host_only:
            exposed = beyond(exposed, self.windows @ times_s, contention)
        return BlockTimes(
            forward_s=self.forward @ times_s,
            backward_s=self.backward @ times_s,
            weight_s=self.weight @ times_s,
            recompute_s=self.recompute @ times_s,
            transfer_s={key: home @ exposed for key, home in self.homes.items()},
        )


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


def block_sums(
    blocks: Sequence[Block],
    index: ItemIndex,
    weight_fracs: Mapping[OperatorKind, float] | None = None,
) -> BlockSums:
    """The matrices of some blocks; their items are entered into the index.

    ``weight_fracs`` is the measured share of the weight's gradient in a backward phase by kind; a
    linear that it leaves out has half, as its two products have the same FLOP.
    """
    return _Writer(index, weight_fracs or {}).write(blocks)


class _Writer:
    def __init__(self, index: ItemIndex, weight_fracs: Mapping[OperatorKind, float]) -> None:
        self._index = index
        self._weight_fracs = weight_fracs
        self._phases = {
            Phase.FORWARD: Sums(),
            Phase.BACKWARD: Sums(),
            Phase.RECOMPUTE: Sums(),
            Phase.WEIGHT_GRADIENT: Sums(),
        }
        self._uses, self._windows = Sums(), Sums()
        self._homes = {(place, part): Sums() for place in _PASSES for part in PASS_PARTS}

    def write(self, blocks: Sequence[Block]) -> BlockSums:
        for row, block in enumerate(blocks):
            self._operators(row, block)
            for uses in _sharing(block.uses):
                self._transfers(row, block, uses)
        rows, num_uses = len(blocks), self._uses.num_rows

        def sums(phase: Phase) -> SparseRows:
            return self._phases[phase].matrix(num_rows=rows)

        return BlockSums(
            forward=sums(Phase.FORWARD),
            backward=sums(Phase.BACKWARD),
            weight=sums(Phase.WEIGHT_GRADIENT),
            recompute=sums(Phase.RECOMPUTE),
            uses=self._uses.matrix(),
            windows=self._windows.matrix(num_rows=num_uses),
            homes={key: home.matrix(num_rows=rows) for key, home in self._homes.items()},
        )

    def _operators(self, row: int, block: Block) -> None:
        place = self._index.place
        for phase, operators in (
            (Phase.FORWARD, block.forward),
            (Phase.BACKWARD, block.backward),
            (Phase.RECOMPUTE, block.recompute),
        ):
            columns = [place(operator) for operator, _ in operators]
            self._phases[phase].extend(row, columns, [float(count) for _, count in operators])
            if phase is Phase.BACKWARD:
                for column, (operator, count) in zip(columns, operators, strict=True):
                    if has_weights(operator.kind):
                        share = self._weight_fracs.get(operator.kind, _WEIGHT_FRAC)
                        self._phases[Phase.WEIGHT_GRADIENT].add(row, column, count * share)

    def _transfers(self, row: int, block: Block, uses: Sequence[CollectiveUse]) -> None:
        entry = self._uses.row()
        for use in uses:
            self._uses.add(entry, self._index.place(use.call), use.count)
        first = uses[0]
        self._homes[first.placement, part_of(first.call.role)].add(row, entry)
        if first.overlaps_with is None:
            return
        phase = Phase(first.placement.value)
        for operator, count in block.operators:
            if operator.kind is first.overlaps_with and operator.phase is phase:
                is_half = phase is Phase.BACKWARD and has_weights(operator.kind)
                self._windows.add(
                    entry, self._index.place(operator), count * (0.5 if is_half else 1)
                )


def has_weights(kind: OperatorKind) -> bool:
    """True where half of the backward phase is the gradient of weights."""
    return kind.is_linear or kind is OperatorKind.GROUPED_LINEAR


def _sharing(uses: Sequence[CollectiveUse]) -> list[list[CollectiveUse]]:
    """Transfers that one window hides together.

    A linear's backward has two products, each with a transfer of its own beside it; everything else
    hides all transfers of a pass behind one operator.
    """
    rows: list[list[CollectiveUse]] = []
    shared: dict[tuple[Placement, OperatorKind, Part], list[CollectiveUse]] = {}
    for use in uses:
        behind = use.overlaps_with
        if behind is None or has_weights(behind):
            rows.append([use])
            continue
        key = (use.placement, behind, part_of(use.call.role))
        if key not in shared:
            rows.append(shared.setdefault(key, []))
        shared[key].append(use)
    return rows
