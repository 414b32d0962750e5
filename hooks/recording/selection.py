"""What of a window is kept where not all of it fits: whole steps, and whole passes within them.

Ranks choose for themselves and never talk, yet a transfer is only measured where all ranks of its
group keep it.  So every choice is one of a nested row, ordered by the numbers of steps and passes
alone: whatever a rank with less room keeps, all others keep as well.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...calib.records.packed import Packer
from ...calib.records.record_kinds import (
    CollectiveRecord,
    OperatorRecord,
    PhaseRecord,
    Record,
    to_dict,
)
from ..sensors.recorder import BACKWARD, FORWARD

STEPS_WANTED = 4
"""Steps that share the room before passes are kept whole: medians need several."""
_ALWAYS = 64
"""More halvings than any step has passes."""
_PASSES = (FORWARD, BACKWARD)
_WEIGHT = re.compile(r'"stands_for": ([0-9.e+-]+)')
"""The part of a collective's line that says how many calls it stands for."""


def line_of(record: Record) -> str:
    """The record as a line of a file."""
    return json.dumps(to_dict(record)) + "\n"


def in_keeping_order(ordinals: Iterable[int]) -> list[int]:
    """Ordinals of hooked steps, the first to be kept first: any beginning of it is spread evenly.

    >>> in_keeping_order(range(10))
    [0, 8, 4, 2, 6, 1, 3, 5, 7, 9]
    """
    return sorted(ordinals, key=lambda n: (-_num_halvings(n), n))


def levels_of(samples: Sequence[int]) -> list[int]:
    """The highest level at which each pass is still kept, by its number in the order of passes.

    ``samples`` is that of the step's log.  Level 0 has all passes, level 1 those whose operators
    were timed, each further one half of the micro-batches before.

    >>> levels_of((0, -1, 2, -1, 4, -1, 6, -1))
    [64, 0, 1, 0, 2, 0, 1, 0]
    """
    timed = {number: i for i, number in enumerate(sorted({m for m in samples if m >= 0}))}
    return [_level(timed[m]) if m >= 0 else 0 for m in samples]


def _level(number: int) -> int:
    return 1 + _num_halvings(number) if number else _ALWAYS


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    level: int
    kind: str = ""
    """Kind of a transfer inside a pass: it stands for those like it in passes that are left out."""


class StepDetail:
    """The lines of one hooked step, each with the level up to which it is kept.

    Phases and what happens outside the passes are kept at every level.  ``records`` are all of the
    step; those that ``keeps`` refuses only tell where passes begin and end.
    """

    def __init__(
        self,
        records: Iterable[Record],
        samples: Sequence[int] = (),
        *,
        keeps: Callable[[Record], bool] = lambda record: True,
        pace: Callable[[], object] = lambda: None,
    ) -> None:
        known = list(records)
        phases = [r for r in known if isinstance(r, PhaseRecord) and r.name in _PASSES]
        phases.sort(key=lambda r: r.start_ns)
        self._starts = [r.start_ns for r in phases]
        self._ends = [r.start_ns + r.duration_ns for r in phases]
        levels = levels_of(samples)
        self._levels = [
            levels[r.microbatch % len(levels)] if levels else _level(r.microbatch) for r in phases
        ]
        self._lines = []
        for record in known:
            pace()
            if keeps(record):
                self._lines.append(self._line(record))

    @property
    def max_level(self) -> int:
        """The level beyond which nothing more goes."""
        return max((level for level in self._levels if level < _ALWAYS), default=0) + 1

    def lines(self, level: int) -> list[str]:
        """What is kept at a level."""
        kept = [line for line in self._lines if line.level >= level]
        num_all = Counter(line.kind for line in self._lines)
        num_kept = Counter(line.kind for line in kept)
        out = []
        for line in kept:
            factor = num_all[line.kind] / num_kept[line.kind] if line.kind else 1.0
            out.append(line.text if factor == 1.0 else _weighted(line.text, factor))
        return out

    def _line(self, record: Record) -> _Line:
        level, kind = _ALWAYS, ""
        if isinstance(record, CollectiveRecord):
            level = self._home(record.issue_ns)
            if self._is_inside(record.issue_ns):
                kind = f"{record.collective.value} {record.group} {record.ranks} {record.peer}"
        elif isinstance(record, OperatorRecord):
            level = self._home(record.start_ns)
        return _Line(line_of(record), level, kind)

    def _home(self, at_ns: int) -> int:
        """Level of the pass that is open at a time; that of what is always kept outside of them."""
        return self._levels[self._index(at_ns)] if self._is_inside(at_ns) else _ALWAYS

    def _is_inside(self, at_ns: int) -> bool:
        index = self._index(at_ns)
        return index >= 0 and at_ns < self._ends[index]

    def _index(self, at_ns: int) -> int:
        return bisect_right(self._starts, at_ns) - 1


def _weighted(text: str, factor: float) -> str:
    return _WEIGHT.sub(lambda found: f'"stands_for": {float(found[1]) * factor:.6g}', text)


def pack_steps(packer: Packer, steps: Iterator[StepDetail], num_steps: int) -> int:
    """Put as many steps into the packer as fit, taken in keeping order; how many that are.

    The first one decides the level, such that ``STEPS_WANTED`` like it have room.  Where passes are
    left out there are no more steps than those: with less room there would be as many.
    """
    level, num_kept, num_wanted = -1, 0, max(1, min(num_steps, STEPS_WANTED))
    for step in steps:
        if level < 0:
            level = _fitting_level(step, packer.num_left * 9 // (10 * num_wanted))
        if not packer.add(step.lines(level)):
            break
        num_kept += 1
        if level and num_kept == num_wanted:
            break
    return num_kept


def _fitting_level(step: StepDetail, nbytes: int) -> int:
    levels: Sequence[int] = range(step.max_level + 1)
    for level in levels:
        if Packer.compressed_nbytes(step.lines(level)) <= nbytes:
            return level
    return levels[-1]


def _num_halvings(number: int) -> int:
    """How often a number can be halved without rest."""
    return (number & -number).bit_length() - 1 if number else _ALWAYS
