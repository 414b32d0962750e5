"""Operators as arrays: many shapes of one kind and phase at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..workload.operators import Operator, OperatorKind, Phase


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShapeBatch:
    """Shapes of one operator kind in one phase."""

    kind: OperatorKind
    phase: Phase
    sizes: NDArray[np.float64]
    """Canonical sizes of the kind (comments of ``OperatorKind``), ``(rows, sizes)``."""
    element_nbytes: NDArray[np.float64]
    """Bytes of one element, ``(rows,)``."""

    def __len__(self) -> int:
        return len(self.element_nbytes)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> ShapeBatch:
        """Return the rows selected by an index or mask."""
        return replace(self, sizes=self.sizes[rows], element_nbytes=self.element_nbytes[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timed:
    """A batch with the time that each of its rows took on one machine."""

    batch: ShapeBatch
    time_s: NDArray[np.float64]
    weight: NDArray[np.float64]
    """1 for a recent sample, less for an old or doubtful one."""

    def __len__(self) -> int:
        return len(self.time_s)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Timed:
        """Return the rows selected by an index or mask."""
        return Timed(
            batch=self.batch.take(rows), time_s=self.time_s[rows], weight=self.weight[rows]
        )


def batch_of(operators: Sequence[Operator]) -> ShapeBatch:
    """Return the batch of operators that all have one kind and phase, in their order.

    >>> norm = Operator(kind=OperatorKind.NORM, phase=Phase.FORWARD, shape=(8, 4), element_nbytes=2)
    >>> batch_of([norm, norm]).sizes.tolist()
    [[8.0, 4.0], [8.0, 4.0]]
    """
    return ShapeBatch(
        kind=operators[0].kind,
        phase=operators[0].phase,
        sizes=np.array([o.shape for o in operators], dtype=np.float64).reshape(len(operators), -1),
        element_nbytes=np.array([o.element_nbytes for o in operators], dtype=np.float64),
    )


def spread_rows(
    sizes: NDArray[np.float64], times: NDArray[np.float64], most: int
) -> NDArray[np.int64]:
    """Return at most ``most`` row numbers, spread evenly over the order of times, then of sizes
    ``(rows, sizes)``.

    >>> spread_rows(np.ones((4, 1)), np.array([4.0, 1.0, 3.0, 2.0]), 2).tolist()
    [1, 0]
    """
    order = np.lexsort((*sizes.T, times))
    number = min(len(order), most)
    return order[np.linspace(0, len(order) - 1, number).round().astype(np.int64)]
