"""Passes of blocks as sums over their operators and transfers, less the hidden part of
transfers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..layers.blocks import Block, BlockKind
from ..workload.collectives import CollectiveUse, OtherPass, Placement
from ..workload.operators import OperatorCount, OperatorKind, Phase
from .items import PASS_PARTS, Floats, ItemIndex, Part, SparseRows, Sums, part_of
from .overlap import ShardSums, ShardTimes, ShardWriter, exposed_part, is_shard

_WEIGHT_FRAC = 0.5
"""Share of the weight's gradient in a linear's backward phase: two products of one size."""
_PASSES = (Placement.FORWARD, Placement.BACKWARD, Placement.RECOMPUTE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockTimes:
    """Seconds of one micro-batch in each block, shape (blocks, alternatives)."""

    forward_s: Floats
    backward_s: Floats
    deferrable_s: Floats
    """Part of the head's ``backward_s`` that computes the output table's gradient; 0 for other
    blocks."""
    recompute_s: Floats
    transfer_s: dict[tuple[Placement, Part], Floats]
    """Exposed transfers by pass and part."""
    shards_s: ShardTimes | None = None
    """Transfers of sharded weights and gradients; None if blocks have none."""
    copies_s: dict[Placement, Floats] | None = None
    """Copies of activations concurrent with each pass; None if blocks have none."""
    waits_s: Floats | None = None
    """Part of the passes in which a device waits for the host's launches; None if unknown."""

    @property
    def copy_exposed_s(self) -> Floats:
        """Exposed copies of activations in both passes of a block."""
        return self.copied_s(Placement.FORWARD) + self.copied_s(Placement.BACKWARD)

    def copied_s(self, placement: Placement) -> Floats:
        """Return the exposed copies of activations in one pass of a block."""
        if self.copies_s is None:
            return 0 * self.forward_s
        # Copy engines do the work, and use little of the memory's rate.
        return exposed_part(self.copies_s[placement], self._unsharded_s(placement), 1.0)

    @property
    def forward_pass_s(self) -> Floats:
        """Operators and transfers of the forward pass."""
        return self._passed(Placement.FORWARD)

    @property
    def backward_pass_s(self) -> Floats:
        """Operators and transfers of the backward pass, recompute included."""
        return self._passed(Placement.BACKWARD)

    @property
    def shard_exposed_s(self) -> Floats:
        """Exposed transfers of shards in both passes of a block between others of its kind."""
        return self.sharded_s(Placement.FORWARD) + self.sharded_s(Placement.BACKWARD)

    def sharded_s(self, placement: Placement) -> Floats:
        """Return the exposed transfers of shards in one pass of a block between others of its
        kind."""
        if self.shards_s is None:
            return 0 * self.forward_s
        return self.shards_s.exposed(placement, self._unsharded_s(placement))

    def edge_s(self, placement: Placement) -> Floats | None:
        """Return the hidden part of one transfer of a block; None if nothing is sharded.

        The first gather of a pass and the last reduction have no neighbour to hide behind.
        """
        if self.shards_s is None:
            return None
        return self.shards_s.edge(placement, self._unsharded_s(placement))

    def _passed(self, placement: Placement) -> Floats:
        unsharded_s = self._unsharded_s(placement)
        passed_s = unsharded_s if self.copies_s is None else unsharded_s + self.copied_s(placement)
        if self.shards_s is None:
            return passed_s
        return passed_s + self.shards_s.exposed(placement, unsharded_s)

    def _unsharded_s(self, placement: Placement) -> Floats:
        """Return the time of a pass without that of sharding."""
        if placement is Placement.FORWARD:
            return self.forward_s + self._transfers(Placement.FORWARD)
        transfers = self._transfers(Placement.BACKWARD) + self._transfers(Placement.RECOMPUTE)
        return self.backward_s + self.recompute_s + transfers

    def part_s(self, part: Part) -> Floats:
        """Return the exposed transfers of one part in both passes."""
        return sum((self.transfer_s[place, part] for place in _PASSES), 0 * self.forward_s)

    def _transfers(self, place: Placement) -> Floats:
        return sum((self.transfer_s[place, part] for part in PASS_PARTS), 0 * self.forward_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockSums:
    """Matrices over items whose products are the sums; transfers that share a window are one row of
    ``uses``."""

    forward: SparseRows
    backward: SparseRows
    deferrable: SparseRows
    recompute: SparseRows
    uses: SparseRows
    windows: SparseRows
    """Work that each row of ``uses`` may hide behind; empty if it does not overlap."""
    homes: dict[tuple[Placement, Part], SparseRows]
    """Rows of ``uses`` that each block adds up, by pass and part."""
    shards: ShardSums | None = None
    """Transfers of shards; None if nothing is sharded beyond the optimizer."""
    copies: dict[Placement, SparseRows] | None = None
    """Copies of activations; None if there are none."""

    def times(
        self, times_s: Floats, *, contention: float | Floats, is_host_only: bool
    ) -> BlockTimes:
        """Return the times of the blocks from those of the items, shape (items, alternatives).

        On a device without streams of its own (``is_host_only``) nothing overlaps: transfers use
        the cores that compute. On others an overlapped transfer slows both itself and the work by
        ``contention``.
        """
        exposed = self.uses @ times_s
        if not is_host_only:
            exposed = exposed_part(exposed, self.windows @ times_s, contention)
        return BlockTimes(
            forward_s=self.forward @ times_s,
            backward_s=self.backward @ times_s,
            deferrable_s=self.deferrable @ times_s,
            recompute_s=self.recompute @ times_s,
            transfer_s={key: home @ exposed for key, home in self.homes.items()},
            shards_s=self.shards.times(times_s, contention=contention, is_host_only=is_host_only)
            if self.shards
            else None,
            copies_s={place: rows @ times_s for place, rows in self.copies.items()}
            if self.copies
            else None,
        )


def block_sums(
    blocks: Sequence[Block],
    index: ItemIndex,
    copies: Sequence[Sequence[OperatorCount]] = (),
) -> BlockSums:
    """Build the matrices of some blocks; their items are entered into the index.

    ``copies`` are the concurrent copies of activations of each block.
    """
    sums = _Writer(index).write(blocks)
    if not any(copies):
        return sums
    rows = {Placement.FORWARD: Sums(), Placement.BACKWARD: Sums()}
    for row, operator_counts in enumerate(copies):
        for operator, count in operator_counts:
            rows[Placement(operator.phase.value)].add(row, index.place(operator), count)
    matrices = {place: sums_of.matrix(num_rows=len(blocks)) for place, sums_of in rows.items()}
    return replace(sums, copies=matrices)


class _Writer:
    def __init__(self, index: ItemIndex) -> None:
        self._index = index
        self._phases = {Phase.FORWARD: Sums(), Phase.BACKWARD: Sums(), Phase.RECOMPUTE: Sums()}
        self._deferrable = Sums()
        self._uses, self._windows = Sums(), Sums()
        self._homes = {(place, part): Sums() for place in _PASSES for part in PASS_PARTS}
        self._shards = ShardWriter(index)

    def write(self, blocks: Sequence[Block]) -> BlockSums:
        for row, block in enumerate(blocks):
            self._operators(row, block)
            for uses in _sharing(use for use in block.uses if not is_shard(use)):
                self._transfers(row, block, uses)
            for use in filter(is_shard, block.uses):
                self._shards.add(row, use)
        rows, num_uses = len(blocks), self._uses.num_rows

        def sums(phase: Phase) -> SparseRows:
            return self._phases[phase].matrix(num_rows=rows)

        return BlockSums(
            forward=sums(Phase.FORWARD),
            backward=sums(Phase.BACKWARD),
            deferrable=self._deferrable.matrix(num_rows=rows),
            recompute=sums(Phase.RECOMPUTE),
            uses=self._uses.matrix(),
            windows=self._windows.matrix(num_rows=num_uses),
            homes={key: home.matrix(num_rows=rows) for key, home in self._homes.items()},
            shards=self._shards.sums(rows),
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
            if phase is Phase.BACKWARD and block.kind is BlockKind.HEAD:
                for column, (operator, count) in zip(columns, operators, strict=True):
                    if has_weights(operator.kind):
                        self._deferrable.add(row, column, count * _WEIGHT_FRAC)

    def _transfers(self, row: int, block: Block, uses: Sequence[CollectiveUse]) -> None:
        entry = self._uses.row()
        for use in uses:
            self._uses.add(entry, self._index.place(use.call), use.count)
        first = uses[0]
        self._homes[first.placement, part_of(first.call.role)].add(row, entry)
        if first.other_pass is not OtherPass.NONE:
            self._other_pass(entry, block, first.other_pass)
        phase = Phase(first.placement.value)
        for operator, count in block.operators if first.overlapping_operators else ():
            if (
                operator.phase is phase
                and (operator.kind, operator.shape) in first.overlapping_operators
            ):
                self._windows.add(entry, self._index.place(operator), count)
        if first.overlaps_with is None:
            return
        for operator, count in block.operators:
            if operator.kind is first.overlaps_with and operator.phase is phase:
                is_half = phase is Phase.BACKWARD and has_weights(operator.kind)
                share = _WEIGHT_FRAC if is_half else 1.0
                self._windows.add(entry, self._index.place(operator), count * share)

    def _other_pass(self, entry: int, block: Block, other_pass: OtherPass) -> None:
        """Add half of both passes as a window: two micro-batches overlap in a layer, and their
        transfers share it."""
        for operator, count in (*block.forward, *block.backward):
            is_cut = other_pass is OtherPass.INPUTS and operator.phase is Phase.BACKWARD
            share = 1.0 - _WEIGHT_FRAC if is_cut and has_weights(operator.kind) else 1.0
            self._windows.add(entry, self._index.place(operator), 0.5 * count * share)


def has_weights(kind: OperatorKind) -> bool:
    """Return True if half of the backward phase is the gradient of weights."""
    return kind.is_linear or kind is OperatorKind.GROUPED_LINEAR


def _sharing(uses: Iterable[CollectiveUse]) -> list[list[CollectiveUse]]:
    """Group transfers that one window hides together.

    A linear's backward has two products, each overlapped with a transfer of its own; all other
    transfers of a pass are hidden together behind one operator or several, or behind another
    micro-batch.
    """
    rows: list[list[CollectiveUse]] = []
    shared: dict[tuple[Hashable, ...], list[CollectiveUse]] = {}
    for use in uses:
        behind = use.overlaps_with
        is_alone = use.other_pass is OtherPass.NONE and not use.overlapping_operators
        if is_alone and (behind is None or has_weights(behind)):
            rows.append([use])
            continue
        key = (
            use.placement,
            behind or use.overlapping_operators or use.other_pass,
            part_of(use.call.role),
        )
        if key not in shared:
            rows.append(shared.setdefault(key, []))
        shared[key].append(use)
    return rows
