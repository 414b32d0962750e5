"""Passes of blocks as sums over their operators and transfers, with what overlaps taken off."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..layers import Block
from ..workload import CollectiveUse, OperatorCount, OperatorKind, OtherPass, Phase, Placement
from .items import PASS_PARTS, Floats, ItemIndex, Part, SparseRows, Sums, part_of
from .overlap import ShardSums, ShardTimes, ShardWriter, beyond, is_shard

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
    shards_s: ShardTimes | None = None
    """Transfers of sharded weights and gradients; None where blocks have none."""
    copies_s: dict[Placement, Floats] | None = None
    """Copies of activations beside each pass; None where blocks have none."""
    waits_s: Floats | None = None
    """What of the passes a device waits for the host to launch; None where that is not known."""

    @property
    def copy_exposed_s(self) -> Floats:
        """What copies of activations add to both passes of a block."""
        return self.copied_s(Placement.FORWARD) + self.copied_s(Placement.BACKWARD)

    def copied_s(self, placement: Placement) -> Floats:
        """What copies of activations add to one pass of a block."""
        if self.copies_s is None:
            return 0 * self.forward_s
        # Engines of their own copy; what they take of the memory's rate is little.
        return beyond(self.copies_s[placement], self._own(placement), 1.0)

    @property
    def forward_pass_s(self) -> Floats:
        """Operators and transfers of the forward pass."""
        return self._passed(Placement.FORWARD)

    @property
    def backward_pass_s(self) -> Floats:
        """Operators and transfers of the backward pass, recomputation included."""
        return self._passed(Placement.BACKWARD)

    @property
    def shard_exposed_s(self) -> Floats:
        """What transfers of shards add to both passes of a block between others of its kind."""
        return self.sharded_s(Placement.FORWARD) + self.sharded_s(Placement.BACKWARD)

    def sharded_s(self, placement: Placement) -> Floats:
        """What transfers of shards add to one pass of a block between others of its kind."""
        if self.shards_s is None:
            return 0 * self.forward_s
        return self.shards_s.exposed(placement, self._own(placement))

    def edge_s(self, placement: Placement) -> Floats | None:
        """What one transfer of a block would have hidden; None where nothing is sharded.

        The first gather of a pass and the last reduction have no neighbour to hide behind.
        """
        if self.shards_s is None:
            return None
        return self.shards_s.edge(placement, self._own(placement))

    def _passed(self, placement: Placement) -> Floats:
        own_s = self._own(placement)
        passed_s = own_s if self.copies_s is None else own_s + self.copied_s(placement)
        if self.shards_s is None:
            return passed_s
        return passed_s + self.shards_s.exposed(placement, own_s)

    def _own(self, placement: Placement) -> Floats:
        """A pass without what sharding adds to it."""
        if placement is Placement.FORWARD:
            return self.forward_s + self._transfers(Placement.FORWARD)
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
    shards: ShardSums | None = None
    """None where nothing is sharded beyond the optimizer."""
    copies: dict[Placement, SparseRows] | None = None
    """Copies of activations; None where there are none."""

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
    weight_fracs: Mapping[OperatorKind, float] | None = None,
    copies: Sequence[Sequence[OperatorCount]] = (),
) -> BlockSums:
    """The matrices of some blocks; their items are entered into the index.

    ``copies``: those of activations beside each block.

    ``weight_fracs`` is the measured share of the weight's gradient in a backward phase by kind; a
    linear that it leaves out has half, as its two products have the same FLOP.
    """
    sums = _Writer(index, weight_fracs or {}).write(blocks)
    if not any(copies):
        return sums
    rows = {Placement.FORWARD: Sums(), Placement.BACKWARD: Sums()}
    for row, found in enumerate(copies):
        for operator, count in found:
            rows[Placement(operator.phase.value)].add(row, index.place(operator), count)
    matrices = {place: sums_of.matrix(num_rows=len(blocks)) for place, sums_of in rows.items()}
    return replace(sums, copies=matrices)


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
            weight=sums(Phase.WEIGHT_GRADIENT),
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
        if first.other_pass is not OtherPass.NONE:
            self._other_pass(entry, block, first.other_pass)
        phase = Phase(first.placement.value)
        for operator, count in block.operators if first.beside else ():
            if operator.phase is phase and (operator.kind, operator.shape) in first.beside:
                self._windows.add(entry, self._index.place(operator), count)
        if first.overlaps_with is None:
            return
        for operator, count in block.operators:
            if operator.kind is first.overlaps_with and operator.phase is phase:
                is_half = phase is Phase.BACKWARD and has_weights(operator.kind)
                self._windows.add(
                    entry, self._index.place(operator), count * (0.5 if is_half else 1)
                )

    def _other_pass(self, entry: int, block: Block, beside: OtherPass) -> None:
        """Half of both passes: two micro-batches meet in a layer, and their transfers share it."""
        for operator, count in (*block.forward, *block.backward):
            is_cut = beside is OtherPass.INPUTS and operator.phase is Phase.BACKWARD
            share = 1.0
            if is_cut and has_weights(operator.kind):
                share -= self._weight_fracs.get(operator.kind, _WEIGHT_FRAC)
            self._windows.add(entry, self._index.place(operator), 0.5 * count * share)


def has_weights(kind: OperatorKind) -> bool:
    """True where half of the backward phase is the gradient of weights."""
    return kind.is_linear or kind is OperatorKind.GROUPED_LINEAR


def _sharing(uses: Iterable[CollectiveUse]) -> list[list[CollectiveUse]]:
    """Transfers that one window hides together.

    A linear's backward has two products, each with a transfer of its own beside it; everything else
    hides all transfers of a pass behind one operator or several, or behind another micro-batch.
    """
    rows: list[list[CollectiveUse]] = []
    shared: dict[tuple[Hashable, ...], list[CollectiveUse]] = {}
    for use in uses:
        behind = use.overlaps_with
        is_alone = use.other_pass is OtherPass.NONE and not use.beside
        if is_alone and (behind is None or has_weights(behind)):
            rows.append([use])
            continue
        key = (use.placement, behind or use.beside or use.other_pass, part_of(use.call.role))
        if key not in shared:
            rows.append(shared.setdefault(key, []))
        shared[key].append(use)
    return rows
