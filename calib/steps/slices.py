"""Spans of a simulated step as slices: operators, transfers, the host, and what is waited for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ..fit import Source
from ..layers import Block, BlockKind
from ..timeline import (
    PASS_PARTS,
    Compiled,
    Floats,
    GroupTimes,
    Item,
    Part,
    SparseRows,
    TaskKind,
    is_shard,
    item_name,
    part_of,
)
from ..workload import CollectiveUse, Operator, OtherPass, Placement

WAITING = "waiting"
"""For kernels that the host has yet to launch, or for another stage."""
Place: TypeAlias = tuple[TaskKind, int, int]
"""Spans that are made of the same: kind, stage and chunk; the chunk is -1 at the ends of a step."""


class Slice(NamedTuple):
    """Operators or transfers of one kind within a span, one after another."""

    name: str
    """Of the item, ``host`` or ``waiting``."""
    phase: str
    """Phase of an operator; empty for anything else."""
    part: Part
    calls: float
    time_s: float
    """What it adds to the span; all slices of a span add up to it."""
    hidden_s: float = 0.0
    """What else it takes, behind other work."""
    source: Source | None = None
    """Where the time comes from; None for a wait."""

    def scaled(self, factor: float) -> Slice:
        """The same in a step that takes ``factor`` times as long."""
        return self._replace(time_s=factor * self.time_s, hidden_s=factor * self.hidden_s)


class Timed(NamedTuple):
    """An item, so many times, with its own seconds."""

    item: Item
    source: Source
    calls: float
    time_s: float
    is_open: bool = False
    """Nothing hides it."""

    def slice(self, part: Part, time_s: float | None = None) -> Slice:
        """The item as a slice, whole or of ``time_s``: what it takes beyond that is hidden."""
        time_s = self.time_s if time_s is None else time_s
        return Slice(
            name=item_name(self.item),
            phase=self.item.phase.value if isinstance(self.item, Operator) else "",
            part=part,
            calls=self.calls,
            time_s=time_s,
            hidden_s=max(0.0, self.time_s - time_s),
            source=self.source,
        )


def exposed(work: Sequence[Timed], part: Part, total_s: float) -> Iterator[Slice]:
    """Transfers that add ``total_s`` together: what is open whole, the rest in equal shares."""
    own_s = sum(one.time_s for one in work)
    open_s = sum(one.time_s for one in work if one.is_open)
    beside_s = own_s - open_s
    share = max(0.0, total_s - open_s) / beside_s if beside_s > 0 else 0.0
    for one in work:
        yield one.slice(part, one.time_s * (1.0 if one.is_open else share))


def waiting(part: Part, time_s: float, phase: str = "") -> Slice:
    """A wait."""
    return Slice(name=WAITING, phase=phase, part=part, calls=1.0, time_s=time_s)


def joined(slices: Iterable[Slice], least_s: float) -> tuple[Slice, ...]:
    """Equal neighbours as one, without those that take no time, shown or hidden."""
    found: list[Slice] = []
    for one in slices:
        if one.time_s <= least_s and one.hidden_s <= least_s:
            continue
        last = found[-1] if found else None
        if last is not None and last[:3] == one[:3] and last.source == one.source:
            found[-1] = last._replace(
                calls=last.calls + one.calls,
                time_s=last.time_s + one.time_s,
                hidden_s=last.hidden_s + one.hidden_s,
            )
        else:
            found.append(one)
    return tuple(found)


_ORDER = {kind: place for place, kind in enumerate(BlockKind)}
_LEAST_FRAC = 1e-9
"""Of a step; what is shorter is rounding."""
_LEAST_S = 1e-15
"""Keeps shares finite; no block that works is as short."""


def layout_slices(
    compiled: Compiled,
    found: GroupTimes,
    layout: int,
    items_s: Floats,
    sources: Sequence[Source],
) -> dict[Place, tuple[Slice, ...]]:
    """What every pass, and what runs before and after the pipeline, is made of.

    ``items_s`` are the seconds of the items, shape (items,), that ``found`` was evaluated with in
    its first alternative, which is the one that is told.  Of one place they add up to its spans.
    """
    whole = _Layout(compiled, found, layout, items_s, sources)
    least_s = _LEAST_FRAC * float(found.total_s[layout, 0])
    return {
        place: joined(slices, least_s)
        for place, slices in (*whole.passes(), *_ends(whole, found, layout))
    }


class _Layout:
    def __init__(
        self,
        compiled: Compiled,
        found: GroupTimes,
        layout: int,
        items_s: Floats,
        sources: Sequence[Source],
    ) -> None:
        self.compiled, self.found, self.layout = compiled, found, layout
        self._items_s, self._sources = items_s, sources
        self._places = {item: place for place, item in enumerate(compiled.items)}
        self._plain_s = {
            name: getattr(compiled.sums, name) @ items_s[:, np.newaxis]
            for name in ("forward", "backward", "recompute")
        }

    def passes(self) -> Iterator[tuple[Place, list[Slice]]]:
        """Each pass of each chunk."""
        pipeline = self.found.group.pipeline
        for chunk in range(pipeline.num_chunks):
            stage = chunk % pipeline.num_stages
            yield (TaskKind.FORWARD, stage, chunk), self._forward(chunk)
            if not pipeline.splits_backward:
                yield (TaskKind.BACKWARD, stage, chunk), self._backward(chunk, {})
                continue
            held = self._held(chunk)
            later = {row: _counted(self.compiled.sums.weight, row) for row, _ in held}
            yield (TaskKind.INPUT_GRADIENT, stage, chunk), self._backward(chunk, later)
            weights = [
                self._timed(column, count * own).slice(Part.BACKWARD)
                for row, count in reversed(held)
                for column, own in later[row].items()
            ]
            yield (TaskKind.WEIGHT_GRADIENT, stage, chunk), weights

    def sent(self, rows: SparseRows, row: int, *, is_open: bool) -> list[Timed]:
        """Items of a row, each with how often it comes."""
        counts = _counted(rows, row).items()
        return [self._timed(column, n)._replace(is_open=is_open) for column, n in counts]

    def host(self, which: int) -> Slice:
        """The host's part of a forward pass, of a backward pass, or of a step."""
        frac = float(self.found.group.host_frac[self.layout, 0])
        place = self.compiled.hosts[which]
        timed = self._timed(place, frac)
        return timed.slice(Part.HOST)._replace(name="host")

    def _held(self, chunk: int) -> list[tuple[int, float]]:
        """Blocks of a chunk in model order, each with its number."""
        group = self.found.group
        rows, counts = group.blocks[self.layout].tolist(), group.counts[chunk].tolist()
        held = [(row, count) for row, count in zip(rows, counts, strict=True) if count]
        return sorted(held, key=lambda one: _ORDER[self._block(one[0]).kind])

    def _forward(self, chunk: int) -> list[Slice]:
        out, held = [self.host(0)], self._held(chunk)
        for row, count in held:
            out += self._operators("forward", Part.FORWARD, row, count)
            out += self._transfers(Placement.FORWARD, row, count)
            out += self._copies(Placement.FORWARD, row, count)
        return [*out, *self._shards(Placement.FORWARD, held)]

    def _backward(self, chunk: int, later: dict[int, dict[int, float]]) -> list[Slice]:
        """A backward pass, without the share of weights that comes ``later``."""
        out, held = [self.host(1)], self._held(chunk)
        for row, count in reversed(held):
            out += self._operators("recompute", Part.RECOMPUTE, row, count)
            out += self._transfers(Placement.RECOMPUTE, row, count)
            out += self._operators("backward", Part.BACKWARD, row, count, later.get(row))
            out += self._transfers(Placement.BACKWARD, row, count)
            out += self._copies(Placement.BACKWARD, row, count)
        return [*out, *self._shards(Placement.BACKWARD, held)]

    def _operators(
        self,
        name: str,
        part: Part,
        row: int,
        count: float,
        later: dict[int, float] | None = None,
    ) -> Iterator[Slice]:
        """Those of one phase as layers of this layout run them, then what they wait for."""
        blocks = self.found.blocks
        work = self._work(row)
        entries = _counted(getattr(self.compiled.sums, name), row).items()
        for column, own in entries if part is not Part.BACKWARD else reversed(entries):
            timed = self._timed(column, count * own)
            taken = self._own_s(column, count * (later or {}).get(column, 0.0))
            yield timed.slice(part, work * timed.time_s - taken)._replace(hidden_s=0.0)
        own_s = float(getattr(blocks, f"{name}_s")[row, 0])
        yield waiting(part, count * (own_s - work * float(self._plain_s[name][row, 0])), name)

    def _work(self, row: int) -> float:
        """How much longer operators of a block take in its layers than what they do says."""
        blocks = self.found.blocks
        own_s = blocks.forward_s[row, 0] + blocks.backward_s[row, 0] + blocks.recompute_s[row, 0]
        waits_s = 0.0 if blocks.waits_s is None else blocks.waits_s[row, 0]
        plain_s = sum(float(times_s[row, 0]) for times_s in self._plain_s.values())
        return float((own_s - waits_s) / max(plain_s, _LEAST_S))

    def _transfers(self, placement: Placement, row: int, count: float) -> Iterator[Slice]:
        uses = [use for use in self._block(row).uses if not is_shard(use)]
        for part in PASS_PARTS:
            own = [u for u in uses if u.placement is placement and part_of(u.call.role) is part]
            total_s = count * float(self.found.blocks.transfer_s[placement, part][row, 0])
            yield from exposed([self._use(use, count) for use in own], part, total_s)

    def _copies(self, placement: Placement, row: int, count: float) -> Iterator[Slice]:
        copies = self.compiled.sums.copies
        if copies is not None:
            work = [self._timed(c, count * own) for c, own in copies[placement].entries(row)]
            total_s = count * float(self.found.blocks.copied_s(placement)[row, 0])
            yield from exposed(work, Part.HOST, total_s)

    def _shards(self, placement: Placement, held: list[tuple[int, float]]) -> Iterator[Slice]:
        """Sharded weights and gradients; the first and the last of a pass have no neighbour."""
        edge_s = self.found.blocks.edge_s(placement)
        if edge_s is None:
            return
        work = [
            self._use(use, count)._replace(is_open=not use.is_overlapped)
            for row, count in held
            for use in self._block(row).uses
            if is_shard(use) and use.placement is placement
        ]
        between_s = self.found.blocks.sharded_s(placement)
        total_s = sum(count * float(between_s[row, 0]) for row, count in held)
        total_s += max((float(edge_s[row, 0]) for row, _ in held), default=0.0)
        yield from exposed(work, Part.DP, total_s)

    def _block(self, row: int) -> Block:
        return self.compiled.blocks[row]

    def _use(self, use: CollectiveUse, count: float) -> Timed:
        is_beside = use.overlaps_with or use.beside or use.other_pass is not OtherPass.NONE
        found = self._timed(self._places[use.call], count * use.count)
        return found._replace(is_open=not is_beside)

    def _timed(self, column: int, count: float) -> Timed:
        return Timed(
            item=self.compiled.items[column],
            source=self._sources[column],
            calls=count,
            time_s=self._own_s(column, count),
        )

    def _own_s(self, column: int, count: float) -> float:
        return count * float(self._items_s[column])


def _counted(rows: SparseRows, row: int) -> dict[int, float]:
    """How often each item comes in a row, by its column."""
    counts: dict[int, float] = {}
    for column, count in rows.entries(row):
        counts[column] = counts.get(column, 0.0) + count
    return counts


def _ends(whole: _Layout, found: GroupTimes, layout: int) -> Iterator[tuple[Place, list[Slice]]]:
    """What each stage does before and after the pipeline."""
    group, sums = found.group, whole.compiled.stages
    last = group.pipeline.num_stages - 1
    column = layout * found.total_s.shape[1]
    for stage in range(last + 1):
        row = int(group.stages[stage, layout])

        def sent(
            rows: SparseRows, part: Part, total_s: float | None, row: int = row
        ) -> list[Slice]:
            work = whole.sent(rows, row, is_open=total_s is None)
            return list(exposed(work, part, total_s or 0.0))

        reduce_s, gather_s = (
            float(times_s[stage, layout, 0]) for times_s in (found.reduce_s, found.gather_s)
        )
        before = sent(sums.reduces.total, Part.DP, reduce_s)
        before += sent(sums.finishes, Part.TP, None)
        shared = sent(sums.embedding, Part.DP, None) if stage in (0, last) else []
        done_s = float(found.ready_s[stage, layout, 0] - found.pipeline.end_s[stage, column])
        waits_s = done_s - sum(one.time_s for one in (*before, *shared))
        reduction = [*before, waiting(Part.BUBBLE, waits_s), *shared]
        yield (TaskKind.REDUCE, stage, -1), reduction
        yield (TaskKind.OPTIMIZER, stage, -1), sent(sums.optimizer, Part.OPTIMIZER, None)
        yield (TaskKind.HOST, stage, -1), [whole.host(2)]
        yield (TaskKind.GATHER, stage, -1), sent(sums.gathers.total, Part.DP, gather_s)
