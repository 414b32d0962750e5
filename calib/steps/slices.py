"""Spans of a simulated step as slices: operators, transfers, the host, and waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ..fit.estimates import Source
from ..layers.blocks import Block, BlockKind
from ..timeline.compiled import Compiled
from ..timeline.evaluation import GroupTimes
from ..timeline.items import PASS_PARTS, Floats, Item, Part, SparseRows, item_name, part_of
from ..timeline.overlap import is_shard
from ..timeline.programs import TaskKind
from ..workload.collectives import CollectiveUse, OtherPass, Placement
from ..workload.operators import Operator

WAITING = "waiting"
"""Name of a wait for kernels that the host has yet to launch, or for another stage."""
Place: TypeAlias = tuple[TaskKind, int, int]
"""Identity of spans with equal slices: kind, stage and chunk; the chunk is -1 at the ends of a
step."""


class Slice(NamedTuple):
    """Operators or transfers of one kind within a span, in sequence."""

    name: str
    """Name of the item, ``host`` or ``waiting``."""
    phase: str
    """Phase of an operator; empty for anything else."""
    part: Part
    calls: float
    time_s: float
    """Exposed seconds; all slices of a span add up to it."""
    hidden_s: float = 0.0
    """Seconds hidden behind other work."""
    source: Source | None = None
    """Provenance of the time; None for a wait."""

    def scaled(self, factor: float) -> Slice:
        """Return the slice in a step that takes ``factor`` times as long."""
        return self._replace(time_s=factor * self.time_s, hidden_s=factor * self.hidden_s)


class ItemTime(NamedTuple):
    """An item with its number of calls in a step or a part of it, and their seconds."""

    item: Item
    source: Source
    calls: float
    time_s: float
    is_open: bool = False
    """True if nothing hides it."""

    @property
    def name(self) -> str:
        """Name of the operator or collective."""
        return item_name(self.item)

    @property
    def phase(self) -> str:
        """Phase of an operator; empty for a collective."""
        return self.item.phase.value if isinstance(self.item, Operator) else ""

    @property
    def nbytes(self) -> int:
        """Payload of one call of a collective; 0 for an operator."""
        return 0 if isinstance(self.item, Operator) else self.item.nbytes

    def slice(self, part: Part, time_s: float | None = None) -> Slice:
        """Return the item as a slice of ``time_s``, by default all of it; the rest is hidden."""
        time_s = self.time_s if time_s is None else time_s
        return Slice(
            name=self.name,
            phase=self.phase,
            part=part,
            calls=self.calls,
            time_s=time_s,
            hidden_s=max(0.0, self.time_s - time_s),
            source=self.source,
        )


def exposed(work: Sequence[ItemTime], part: Part, total_s: float) -> Iterator[Slice]:
    """Yield slices of transfers that add ``total_s`` together: open ones whole, the others in equal
    shares."""
    work_s = sum(one.time_s for one in work)
    open_s = sum(one.time_s for one in work if one.is_open)
    overlapping_s = work_s - open_s
    share = max(0.0, total_s - open_s) / overlapping_s if overlapping_s > 0 else 0.0
    for one in work:
        yield one.slice(part, one.time_s * (1.0 if one.is_open else share))


def waiting(part: Part, time_s: float, phase: str = "") -> Slice:
    """Return a slice for a wait."""
    return Slice(name=WAITING, phase=phase, part=part, calls=1.0, time_s=time_s)


def merge_neighbours(slices: Iterable[Slice], least_s: float) -> tuple[Slice, ...]:
    """Merge equal neighbours and drop slices that take no time, exposed or hidden."""
    merged: list[Slice] = []
    for one in slices:
        if one.time_s <= least_s and one.hidden_s <= least_s:
            continue
        last = merged[-1] if merged else None
        if last is not None and last[:3] == one[:3] and last.source == one.source:
            merged[-1] = last._replace(
                calls=last.calls + one.calls,
                time_s=last.time_s + one.time_s,
                hidden_s=last.hidden_s + one.hidden_s,
            )
        else:
            merged.append(one)
    return tuple(merged)


_ORDER = {kind: place for place, kind in enumerate(BlockKind)}
_LEAST_FRAC = 1e-9
"""Share of a step below which a slice is rounding."""
_LEAST_S = 1e-15
"""Keeps shares finite; no block with work is this short."""


def layout_slices(
    compiled: Compiled,
    group_times: GroupTimes,
    layout: int,
    items_s: Floats,
    sources: Sequence[Source],
) -> dict[Place, tuple[Slice, ...]]:
    """Return the slices of every pass, and of the work before and after the pipeline.

    ``items_s`` are the seconds of the items, shape (items,), that ``group_times`` was evaluated
    with in its first alternative, the one reported. The slices of a place add up to its spans.
    """
    whole = _Layout(compiled, group_times, layout, items_s, sources)
    least_s = _LEAST_FRAC * float(group_times.total_s[layout, 0])
    return {
        place: merge_neighbours(slices, least_s)
        for place, slices in (*whole.passes(), *_ends(whole, group_times, layout))
    }


class _Layout:
    def __init__(
        self,
        compiled: Compiled,
        group_times: GroupTimes,
        layout: int,
        items_s: Floats,
        sources: Sequence[Source],
    ) -> None:
        self.compiled, self.group_times, self.layout = compiled, group_times, layout
        self._items_s, self._sources = items_s, sources
        self._places = {item: place for place, item in enumerate(compiled.items)}
        self._plain_s = {
            name: getattr(compiled.sums, name) @ items_s[:, np.newaxis]
            for name in ("forward", "backward", "recompute")
        }

    def passes(self) -> Iterator[tuple[Place, list[Slice]]]:
        """Yield each pass of each chunk."""
        pipeline = self.group_times.group.pipeline
        for chunk in range(pipeline.num_chunks):
            stage = chunk % pipeline.num_stages
            yield (TaskKind.FORWARD, stage, chunk), self._forward(chunk)
            yield (TaskKind.BACKWARD, stage, chunk), self._backward(chunk)

    def sent(self, rows: SparseRows, row: int, *, is_open: bool) -> list[ItemTime]:
        """Return the items of a row, each with its number of calls."""
        counts = _counted(rows, row).items()
        return [self._timed(column, n)._replace(is_open=is_open) for column, n in counts]

    def host(self, which: int) -> Slice:
        """Return the host's part of a forward pass (0), of a backward pass (1), or of a step
        (2)."""
        frac = float(self.group_times.group.host_frac[self.layout, 0])
        place = self.compiled.hosts[which]
        timed = self._timed(place, frac)
        return timed.slice(Part.HOST)._replace(name="host")

    def _block_counts(self, chunk: int) -> list[tuple[int, float]]:
        """Return the blocks of a chunk in model order, each with its number."""
        group = self.group_times.group
        rows, counts = group.blocks[self.layout].tolist(), group.counts[chunk].tolist()
        block_counts = [(row, count) for row, count in zip(rows, counts, strict=True) if count]
        return sorted(block_counts, key=lambda one: _ORDER[self._block(one[0]).kind])

    def _forward(self, chunk: int) -> list[Slice]:
        out, block_counts = [self.host(0)], self._block_counts(chunk)
        for row, count in block_counts:
            out += self._operators("forward", Part.FORWARD, row, count)
            out += self._transfers(Placement.FORWARD, row, count)
            out += self._copies(Placement.FORWARD, row, count)
        return [*out, *self._shards(Placement.FORWARD, block_counts)]

    def _backward(self, chunk: int) -> list[Slice]:
        out, block_counts = [self.host(1)], self._block_counts(chunk)
        for row, count in reversed(block_counts):
            out += self._operators("recompute", Part.RECOMPUTE, row, count)
            out += self._transfers(Placement.RECOMPUTE, row, count)
            out += self._operators("backward", Part.BACKWARD, row, count)
            out += self._transfers(Placement.BACKWARD, row, count)
            out += self._copies(Placement.BACKWARD, row, count)
        return [*out, *self._shards(Placement.BACKWARD, block_counts)]

    def _operators(self, name: str, part: Part, row: int, count: float) -> Iterator[Slice]:
        """Yield one phase's operators as this layout's layers run them, then their wait."""
        blocks = self.group_times.blocks
        work = self._work(row)
        entries = _counted(getattr(self.compiled.sums, name), row).items()
        for column, item_count in entries if part is not Part.BACKWARD else reversed(entries):
            timed = self._timed(column, count * item_count)
            yield timed.slice(part, work * timed.time_s)._replace(hidden_s=0.0)
        phase_s = float(getattr(blocks, f"{name}_s")[row, 0])
        yield waiting(part, count * (phase_s - work * float(self._plain_s[name][row, 0])), name)

    def _work(self, row: int) -> float:
        """Return the ratio of operator times within a block's layers to their plain times."""
        blocks = self.group_times.blocks
        passes_s = blocks.forward_s[row, 0] + blocks.backward_s[row, 0] + blocks.recompute_s[row, 0]
        waits_s = 0.0 if blocks.waits_s is None else blocks.waits_s[row, 0]
        plain_s = sum(float(times_s[row, 0]) for times_s in self._plain_s.values())
        return float((passes_s - waits_s) / max(plain_s, _LEAST_S))

    def _transfers(self, placement: Placement, row: int, count: float) -> Iterator[Slice]:
        uses = [use for use in self._block(row).uses if not is_shard(use)]
        for part in PASS_PARTS:
            part_uses = [
                u for u in uses if u.placement is placement and part_of(u.call.role) is part
            ]
            total_s = count * float(self.group_times.blocks.transfer_s[placement, part][row, 0])
            yield from exposed([self._use(use, count) for use in part_uses], part, total_s)

    def _copies(self, placement: Placement, row: int, count: float) -> Iterator[Slice]:
        copies = self.compiled.sums.copies
        if copies is not None:
            work = [
                self._timed(c, count * item_count)
                for c, item_count in copies[placement].entries(row)
            ]
            total_s = count * float(self.group_times.blocks.copied_s(placement)[row, 0])
            yield from exposed(work, Part.HOST, total_s)

    def _shards(
        self, placement: Placement, block_counts: list[tuple[int, float]]
    ) -> Iterator[Slice]:
        """Yield sharded weights and gradients; the first and the last of a pass have no neighbour
        to overlap."""
        edge_s = self.group_times.blocks.edge_s(placement)
        if edge_s is None:
            return
        work = [
            self._use(use, count)._replace(is_open=not use.is_overlapped)
            for row, count in block_counts
            for use in self._block(row).uses
            if is_shard(use) and use.placement is placement
        ]
        between_s = self.group_times.blocks.sharded_s(placement)
        total_s = sum(count * float(between_s[row, 0]) for row, count in block_counts)
        total_s += max((float(edge_s[row, 0]) for row, _ in block_counts), default=0.0)
        yield from exposed(work, Part.DP, total_s)

    def _block(self, row: int) -> Block:
        return self.compiled.blocks[row]

    def _use(self, use: CollectiveUse, count: float) -> ItemTime:
        is_overlapped = (
            use.overlaps_with or use.overlapping_operators or use.other_pass is not OtherPass.NONE
        )
        timed = self._timed(self._places[use.call], count * use.count)
        return timed._replace(is_open=not is_overlapped)

    def _timed(self, column: int, count: float) -> ItemTime:
        return ItemTime(
            item=self.compiled.items[column],
            source=self._sources[column],
            calls=count,
            time_s=count * float(self._items_s[column]),
        )


def _counted(rows: SparseRows, row: int) -> dict[int, float]:
    """Return the number of calls of each item in a row, by its column."""
    counts: dict[int, float] = {}
    for column, count in rows.entries(row):
        counts[column] = counts.get(column, 0.0) + count
    return counts


def _ends(
    whole: _Layout, group_times: GroupTimes, layout: int
) -> Iterator[tuple[Place, list[Slice]]]:
    """Yield the slices of each stage before and after the pipeline."""
    group, sums = group_times.group, whole.compiled.stages
    last = group.pipeline.num_stages - 1
    column = layout * group_times.total_s.shape[1]
    for stage in range(last + 1):
        row = int(group.stages[stage, layout])

        def sent(
            rows: SparseRows, part: Part, total_s: float | None, row: int = row
        ) -> list[Slice]:
            work = whole.sent(rows, row, is_open=total_s is None)
            return list(exposed(work, part, total_s or 0.0))

        reduce_s, gather_s = (
            float(times_s[stage, layout, 0])
            for times_s in (group_times.reduce_s, group_times.gather_s)
        )
        before = sent(sums.reduces.total, Part.DP, reduce_s)
        before += sent(sums.finishes, Part.TP, None)
        shared = sent(sums.embedding, Part.DP, None) if stage in (0, last) else []
        done_s = float(
            group_times.ready_s[stage, layout, 0] - group_times.pipeline.end_s[stage, column]
        )
        waits_s = done_s - sum(one.time_s for one in (*before, *shared))
        reduction = [*before, waiting(Part.BUBBLE, waits_s), *shared]
        yield (TaskKind.REDUCE, stage, -1), reduction
        yield (TaskKind.OPTIMIZER, stage, -1), sent(sums.optimizer, Part.OPTIMIZER, None)
        yield (TaskKind.HOST, stage, -1), [whole.host(2)]
        yield (TaskKind.GATHER, stage, -1), sent(sums.gathers.total, Part.DP, gather_s)
