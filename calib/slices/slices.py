"""Spans of a simulated step as slices: operators, transfers, the host, and what is waited for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from ..fit.estimates import Source
from ..timeline.items import Item, Part, item_name
from ..timeline.programs import TaskKind
from ..workload.operators import Operator

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
