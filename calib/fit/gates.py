"""Samples that cannot be true: refused before a fit, counted, never refused when scoring.

A gate acts where it refuses at most half of an operator's rows.  Where it would refuse more, the
operator was measured in another way than its name says: it is named as doubtful and kept, since
nothing better is known of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ..workload.operators import Phase
from .batches import Timed
from .laws import Ceilings, Family, columns, family

_COPY_FRAC = 0.01
"""Forward and backward of one shape this close are one number written twice."""
_FEWEST_COPIES = 5
_COPY_EXCESS = 3.0
_COPY_WORK = 1.3
"""Ratio of backward to forward work from which equal times are not to be expected."""
_LEAST_BACKWARD = 0.6
"""Least time of a product's backward over its forward: it has twice the products."""
_LEAST_LEFT = 0.5
_ABOVE_PEAK = 1.03


class Reason(Enum):
    """Why a row is refused."""

    BELOW_ROOFLINE = "below the roofline"
    SHORT_BACKWARD = "backward shorter than possible"
    COPIED_PHASE = "backward equal to forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Rows of one operator that one gate refused, or would have refused."""

    name: str
    reason: Reason
    num_rows: int
    num_refused: int

    @property
    def is_doubtful(self) -> bool:
        """True where most rows fail, so that none was refused."""
        return self.num_refused > (1 - _LEAST_LEFT) * self.num_rows


def refuse(
    groups: Mapping[str, Timed], peaks: Ceilings | None
) -> tuple[dict[str, Timed], tuple[Refusal, ...]]:
    """The rows that pass every gate, and what was refused.

    ``groups`` are named ``<operator>/<phase>``.  ``peaks`` are the rates of the data sheet for the
    groups' element size, None where they are not known: then no row is held against a roofline.
    """
    kept = {name: np.ones(len(timed), dtype=bool) for name, timed in groups.items()}
    found: list[Refusal] = []
    for name in sorted(groups):
        for reason, wrong in _gates(name, groups, peaks):
            if not wrong.any():
                continue
            refusal = Refusal(
                name=name,
                reason=reason,
                num_rows=len(wrong),
                num_refused=int(wrong.sum()),
            )
            found.append(refusal)
            if not refusal.is_doubtful:
                kept[name] &= ~wrong
    passed = {name: timed.take(kept[name]) for name, timed in groups.items() if kept[name].any()}
    return passed, tuple(found)


Mask = NDArray[np.bool_]


def _gates(
    name: str, groups: Mapping[str, Timed], peaks: Ceilings | None
) -> list[tuple[Reason, Mask]]:
    timed = groups[name]
    gates = []
    if peaks is not None and family(timed.batch.kind) in (Family.LINEAR, Family.ATTENTION):
        _, flop, _ = columns(timed.batch).totals().T
        least_s = flop / (_ABOVE_PEAK * peaks.flop_per_s)
        gates.append((Reason.BELOW_ROOFLINE, timed.time_s < least_s))
    other = groups.get(f"{name.rpartition('/')[0]}/{_OPPOSITE.get(timed.batch.phase, '')}")
    if other is None or other.batch.kind is not timed.batch.kind:
        return gates
    ratio = timed.time_s / _same_shape(timed, other)
    forward, backward = (timed, other) if timed.batch.phase is Phase.FORWARD else (other, timed)
    more_work = _work_s(backward, forward) > _COPY_WORK
    if more_work:
        gates.append((Reason.COPIED_PHASE, _copies(ratio)))
    is_product = family(timed.batch.kind) in (Family.LINEAR, Family.ATTENTION)
    if is_product and timed.batch.phase is Phase.BACKWARD:
        gates.append((Reason.SHORT_BACKWARD, ratio < _LEAST_BACKWARD))
    return gates


def _copies(ratio: NDArray[np.float64]) -> Mask:
    """Rows whose phases took equal times, where that is more than ratios near 1 happen to give."""
    apart = np.abs(np.log(ratio))
    same = apart < _COPY_FRAC
    by_chance = ((apart >= _COPY_FRAC) & (apart < 3 * _COPY_FRAC)).sum() / 2
    return same if same.sum() >= _FEWEST_COPIES + _COPY_EXCESS * by_chance else np.zeros_like(same)


_OPPOSITE = {
    Phase.FORWARD: Phase.BACKWARD.value,
    Phase.BACKWARD: Phase.FORWARD.value,
}


def _work_s(backward: Timed, forward: Timed) -> float:
    """Backward over forward work of a typical shape."""
    totals = [np.median(columns(t.batch).totals(), axis=0) for t in (backward, forward)]
    (_, flop_b, bytes_b), (_, flop_f, bytes_f) = totals
    return float((flop_b + bytes_b) / max(flop_f + bytes_f, 1.0))


def _same_shape(timed: Timed, other: Timed) -> NDArray[np.float64]:
    """Times of the other phase at each row's shape; NaN where it has none.

    The k-th repeat of a shape answers to the k-th repeat there.
    """
    known = dict(zip(_keys(other), other.time_s, strict=True))
    return np.array([known.get(key, np.nan) for key in _keys(timed)])


def _keys(timed: Timed) -> list[tuple[float, ...]]:
    seen: dict[tuple[float, ...], int] = {}
    keys = []
    for row in np.column_stack([timed.batch.sizes, timed.batch.element_nbytes]).tolist():
        shape = tuple(row)
        seen[shape] = seen.get(shape, 0) + 1
        keys.append((*shape, seen[shape]))
    return keys
