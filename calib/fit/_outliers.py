"""Refuse samples that cannot be true before a fit; they are counted, and never refused when
scoring.

A gate is applied only if it refuses at most half of an operator's rows. If it would refuse more,
the operator was probably measured differently from what its name says: it is marked as doubtful and
retained, for lack of better samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ..regressors.robust import first_minimum
from ..workload.operators import Phase
from .batches import Timed
from .laws import OperatorFamily, Peaks, columns, family, least_s

_COPY_FRAC = 0.01
"""Largest log distance at which forward and backward of one shape count as one number written
twice."""
_FEWEST_COPIES = 5
"""Minimum number of copies: four rows that agree to a percent may be chance."""
_COPY_EXCESS = 3.0
"""Copies are refused if they are three times as many as chance puts within a percent. With half or
twice the value, the same rows are refused (benchmarks/RESULTS.md)."""
_COPY_WORK = 1.3
"""Ratio of backward to forward work above which equal times are implausible."""
_LEAST_BACKWARD = 0.6
"""Least ratio of a product's backward to its forward time: it has twice the products."""
_LEAST_REMAINING_FRAC = 0.5
"""Least share of rows that must pass: a gate that refuses more than half is more likely wrong
itself."""
_ABOVE_PEAK = 1.03
"""Tolerance over the data sheet for clocks and rounding: sound machines reach 3 % above it."""


class RefusalReason(Enum):
    """Reason for refusing a row."""

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
    """True if too few rows would remain, so that none was refused."""

    @property
    def is_impossible(self) -> bool:
        """True if most rows are faster than the data sheet allows: it is then not the sheet of
        their device."""
        return self.is_doubtful and self.reason is RefusalReason.BELOW_ROOFLINE


def refuse(
    groups: Mapping[str, Timed], peaks: Peaks | None
) -> tuple[dict[str, Timed], tuple[Refusal, ...]]:
    """Return the rows that pass every gate, and the refusals.

    ``groups`` are named ``<operator>/<phase>``. ``peaks`` returns the data sheet's rates for an
    element size; None if they are unknown: rows are then not compared with a roofline.
    """
    passed: dict[str, Timed] = {}
    refusals: list[Refusal] = []
    for name in sorted(groups):
        timed = groups[name]
        keep = np.ones(len(timed), dtype=bool)
        for reason, wrong in _gates(name, groups, peaks):
            if not wrong.any():
                continue
            is_doubtful = bool((keep & ~wrong).sum() < _LEAST_REMAINING_FRAC * len(timed))
            if not is_doubtful:
                keep &= ~wrong
            refusals.append(
                Refusal(
                    name=name,
                    reason=reason,
                    num_rows=len(timed),
                    num_refused=int(wrong.sum()),
                    is_doubtful=is_doubtful,
                )
            )
        passed[name] = timed.take(keep)
    return passed, tuple(refusals)


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
    """Return a mask of rows whose phases took equal times, if there are more than chance ratios
    near 1 explain."""
    apart = np.abs(np.log(ratio))
    same = apart < _COPY_FRAC
    by_chance = ((apart >= _COPY_FRAC) & (apart < 3 * _COPY_FRAC)).sum() / 2
    return same if same.sum() >= _FEWEST_COPIES + _COPY_EXCESS * by_chance else np.zeros_like(same)


_OPPOSITE = {
    Phase.FORWARD: Phase.BACKWARD.value,
    Phase.BACKWARD: Phase.FORWARD.value,
}


def _work_ratio(backward: Timed, forward: Timed) -> float:
    """Return the ratio of backward to forward work of a typical shape."""
    totals = [np.median(columns(t.batch).totals(), axis=0) for t in (backward, forward)]
    (_, flop_b, bytes_b), (_, flop_f, bytes_f) = totals
    return float((flop_b + bytes_b) / max(flop_f + bytes_f, 1.0))


def _same_shape(timed: Timed, other: Timed) -> NDArray[np.float64]:
    """Return the other phase's time at each row's shape, the nearest of repeats; NaN if there is
    none."""
    known: dict[tuple[float, ...], list[float]] = {}
    for key, time_s in zip(_keys(other), other.time_s.tolist(), strict=True):
        known.setdefault(key, []).append(time_s)
    nearest_s = np.full(len(timed), np.nan)
    for i, (key, time_s) in enumerate(zip(_keys(timed), timed.time_s.tolist(), strict=True)):
        if key in known:
            times = np.array(known[key])
            nearest_s[i] = times[first_minimum(np.abs(np.log(times / time_s)))]
    return nearest_s


def _keys(timed: Timed) -> list[tuple[float, ...]]:
    rows = np.column_stack([timed.batch.sizes, timed.batch.element_nbytes])
    return [tuple(row) for row in rows.tolist()]
