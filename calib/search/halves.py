"""Cells in two parts that share nothing, each bounded in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..steps.model import FittedSteps
from .cells import Cells, Ints
from .found import Floats, Pool
from .least_time import TimeBounds

SMALL = 1000
"""Cells that another process is not worth its start for."""
_Asked = tuple[int, Ints | None]
Mapped = Callable[[Sequence[_Asked]], Sequence[Floats]]


def halves(cells: Cells) -> list[Ints]:
    """The cells of every other degree of tp; few are one part."""
    if len(cells) <= SMALL:
        return [np.arange(len(cells))]
    is_odd = cells.distinct(cells.columns["tp"])[1] % 2 == 1
    return [part for part in (np.flatnonzero(~is_odd), np.flatnonzero(is_odd)) if len(part)]


def over_halves(cells: Cells, function: Callable[[Cells], Floats], pool: Pool) -> Floats:
    """The function over the cells, one number for each."""

    def of_part(part: Ints) -> Floats:
        return function(cells.subset(part))

    parts = halves(cells)
    with pool(of_part) as mapped:
        return _joined(len(cells), parts, mapped(parts))


class HalvedBounds:
    """``TimeBounds`` of both halves; a process keeps those of its own."""

    def __init__(self, cells: Cells, steps: FittedSteps) -> None:
        self._cells, self._steps = cells, steps
        self._parts = halves(cells)
        self._bounds: dict[int, TimeBounds] = {}

    def of(self, asked: _Asked) -> Floats:
        """Of one half: bare times, or the whole times of some of its cells."""
        place, members = asked
        if place not in self._bounds:
            part = self._cells.subset(self._parts[place])
            self._bounds[place] = TimeBounds(part, self._steps)
        found = self._bounds[place]
        if members is None:
            return found.bare()
        return found.whole(members)

    def bare(self, mapped: Mapped) -> Floats:
        """Of all cells, shape (cells,), without the experts of their layers; ``mapped`` does ``of``
        for several at once."""
        rows = mapped([(place, None) for place in range(len(self._parts))])
        return _joined(len(self._cells), self._parts, rows)

    def whole(self, members: Ints, mapped: Mapped) -> Floats:
        """Of some cells, shape (members,)."""
        where = [np.flatnonzero(np.isin(members, part)) for part in self._parts]
        asked = [
            (place, np.searchsorted(part, members[chosen]))
            for place, (part, chosen) in enumerate(zip(self._parts, where, strict=True))
        ]
        return _joined(len(members), where, mapped(asked))


def _joined(number: int, parts: Sequence[Ints], found: Sequence[Floats]) -> Floats:
    out = np.empty((number, *found[0].shape[1:]))
    for part, values in zip(parts, found, strict=True):
        out[part] = values
    return out
