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

from ..regressors import first_of_least
from ..workload import Phase
from .batches import Timed
from .laws import OperatorFamily, Peaks, columns, family, least_s

_COPY_FRAC = 0.01
"""Forward and backward of one shape this close are one number written twice."""
_FEWEST_COPIES = 5
"""Four rows that agree to a percent may be chance."""
_COPY_EXCESS = 3.0
"""Copies are told where they are three times as many as chance leaves within a percent. Halved or
doubled, the same rows fall (benchmarks/sensitivity.py)."""
_COPY_WORK = 1.3
"""Ratio of backward to forward work from which equal times are not to be expected."""
_LEAST_BACKWARD = 0.6
"""Least time of a product's backward over its forward: it has twice the products."""
_LEAST_LEFT = 0.5
"""A gate that would refuse more than half of an operator's rows says more of the gate."""
_ABOVE_PEAK = 1.03
"""Clocks and rounding of a data sheet: 3 % above it is measured on sound machines."""


class RefusalReason(Enum):
    """Why a row is refused."""

    BELOW_ROOFLINE = "below the roofline"
    SHORT_BACKWARD = "backward shorter than possible"
    COPIED_PHASE = "backward equal to forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Rows of one operator that one gate refused, or would have refused."""

    name: str
    reason: RefusalReason
    num_rows: int
    num_refused: int
    is_doubtful: bool
    """True where too few rows would be left, so that none was refused."""

    @property
    def is_impossible(self) -> bool:
        """True where most rows are faster than the data sheet, which then is not theirs."""
        return self.is_doubtful and self.reason is RefusalReason.BELOW_ROOFLINE


def refuse(
    groups: Mapping[str, Timed], peaks: Peaks | None
) -> tuple[dict[str, Timed], tuple[Refusal, ...]]:
    """The rows that pass every gate, and what was refused.

    ``groups`` are named ``<operator>/<phase>``.  ``peaks`` gives the rates of the data sheet for a
    size of element; None where they are not known: then no row is held against a roofline.
    """
    passed: dict[str, Timed] = {}
    found: list[Refusal] = []
    for name in sorted(groups):
        timed = groups[name]
        kept = np.ones(len(timed), dtype=bool)
        for reason, wrong in _gates(name, groups, peaks):
            if not wrong.any():
                continue
            is_doubtful = bool((kept & ~wrong).sum() < _LEAST_LEFT * len(timed))
            if not is_doubtful:
                kept &= ~wrong
            found.append(
                Refusal(
                    name=name,
                    reason=reason,
                    num_rows=len(timed),
                    num_refused=int(wrong.sum()),
                    is_doubtful=is_doubtful,
                )
            )
        passed[name] = timed.take(kept)
    return passed, tuple(found)


Mask = NDArray[np.bool_]


def _gates(
    name: str, groups: Mapping[str, Timed], peaks: Peaks | None
) -> list[tuple[RefusalReason, Mask]]:
    timed = groups[name]
    is_product = family(timed.batch.kind) in (OperatorFamily.LINEAR, OperatorFamily.ATTENTION)
    gates = []
    if peaks is not None:
        least = least_s(timed.batch, peaks) / _ABOVE_PEAK
        gates.append((RefusalReason.BELOW_ROOFLINE, timed.time_s < least))
    other = groups.get(f"{name.rpartition('/')[0]}/{_OPPOSITE.get(timed.batch.phase, '')}")
    if other is None or other.batch.kind is not timed.batch.kind:
        return gates
    ratio = timed.time_s / _same_shape(timed, other)
    is_forward = timed.batch.phase is Phase.FORWARD
    forward, backward = (timed, other) if is_forward else (other, timed)
    if _work_ratio(backward, forward) > _COPY_WORK:
        gates.append((RefusalReason.COPIED_PHASE, _copies(ratio)))
    if is_product and not is_forward:
        gates.append((RefusalReason.SHORT_BACKWARD, ratio < _LEAST_BACKWARD))
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


def _work_ratio(backward: Timed, forward: Timed) -> float:
    """Backward over forward work of a typical shape."""
    totals = [np.median(columns(t.batch).totals(), axis=0) for t in (backward, forward)]
    (_, flop_b, bytes_b), (_, flop_f, bytes_f) = totals
    return float((flop_b + bytes_b) / max(flop_f + bytes_f, 1.0))


def _same_shape(timed: Timed, other: Timed) -> NDArray[np.float64]:
    """The other phase's time at each row's shape, of repeats the nearest; NaN where it has none."""
    known: dict[tuple[float, ...], list[float]] = {}
    for key, time_s in zip(_keys(other), other.time_s.tolist(), strict=True):
        known.setdefault(key, []).append(time_s)
    found = np.full(len(timed), np.nan)
    for i, (key, time_s) in enumerate(zip(_keys(timed), timed.time_s.tolist(), strict=True)):
        if key in known:
            times = np.array(known[key])
            found[i] = times[first_of_least(np.abs(np.log(times / time_s)))]
    return found


def _keys(timed: Timed) -> list[tuple[float, ...]]:
    rows = np.column_stack([timed.batch.sizes, timed.batch.element_nbytes])
    return [tuple(row) for row in rows.tolist()]
