"""The physical work of an operator, and its time at the ceilings of a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import CalibrationError
from ..workload.operators import Operator, OperatorKind, Phase
from .batches import ShapeBatch, batch_of
from .operator_kinds import KINDS, Columns, OperatorFamily, WorkKind, on_processor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Rates of one rank's machine that the laws divide by."""

    flop_per_s: float
    bytes_per_s: float
    launch_s: float

    def unit_s(self, cost: WorkKind) -> float:
        """Return the seconds of one launch, FLOP or byte."""
        if cost is WorkKind.LAUNCH:
            return self.launch_s
        return 1.0 / (self.flop_per_s if cost is WorkKind.FLOP else self.bytes_per_s)


Peaks = Callable[[int], Ceilings]
"""Function from an element's bytes to the rates of the data sheet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOP and bytes of one operator in one phase."""

    flop: float
    nbytes: float


def family(kind: OperatorKind) -> OperatorFamily:
    """Return the family of operators that share an error with this kind.

    >>> family(OperatorKind.LOGITS), family(OperatorKind.NORM)
    (<OperatorFamily.LINEAR: 'linear'>, <OperatorFamily.MEMORY: 'memory'>)
    """
    return KINDS[kind].family


def columns(batch: ShapeBatch, num_units: int | None = None) -> Columns:
    """Return FLOP, bytes and launches of every row.

    A product's backward is two products, one for the input's and one for the weight's gradient; a
    linear's weight gradient is added into an fp32 buffer. ``num_units`` is the number of
    multiprocessors of a GPU, whose kernels pad to tiles; 0 stands for a CPU, see ``on_processor``;
    None counts the bare work. Raises ``CalibrationError`` if the number of sizes does not match the
    kind.

    >>> from ..workload.operators import Phase
    >>> fc1 = Operator(kind=OperatorKind.LINEAR_FC1, phase=Phase.FORWARD, shape=(256, 512, 2048),
    ...                element_nbytes=2)
    >>> launches, flop, nbytes = columns(batch_of([fc1])).totals()[0]
    >>> int(flop) == 2 * 256 * 512 * 2048
    True
    >>> int(nbytes) == 2 * (256 * 512 + 512 * 2048 + 256 * 2048)
    True
    """
    expected = KINDS[batch.kind].num_sizes
    if batch.sizes.shape[1] != expected:
        shape = tuple(int(s) for s in batch.sizes[0])
        raise CalibrationError(
            f"{batch.kind.value} shape {shape} has {len(shape)} sizes, not {expected}; record it "
            f"with the same version that reads it"
        )
    work = KINDS[batch.kind].law(batch, num_units or 0)
    return on_processor(batch, work) if num_units == 0 else work


def work_of(batch: ShapeBatch) -> NDArray[np.float64]:
    """Return the size of each row: FLOP and bytes, weighted by a GPU's ceilings, ``(rows,)``."""
    _, flop, nbytes = columns(batch).totals().T
    return flop / _FLOP_PER_BYTE + nbytes


def least_s(batch: ShapeBatch, peaks: Peaks) -> NDArray[np.float64]:
    """Return the least seconds of each row that the data sheet allows, ``(rows,)``.

    This is the longer of its FLOP at the sheet's rate for its elements and its
    ``compulsory_nbytes`` beyond the largest cache at the memory's rate.

    >>> norm = Operator(kind=OperatorKind.NORM, phase=Phase.FORWARD, shape=(2**20, 4096),
    ...                 element_nbytes=2)
    >>> sheet = Ceilings(flop_per_s=1e15, bytes_per_s=2.0**40, launch_s=0.0)
    >>> least_s(batch_of([norm]), lambda nbytes: sheet).tolist() == [(2**34 - 2**28) / 2**40]
    True
    """
    rates = {n: peaks(int(n)) for n in np.unique(batch.element_nbytes)}
    flop_per_s = np.array([rates[n].flop_per_s for n in batch.element_nbytes])
    bytes_per_s = np.array([rates[n].bytes_per_s for n in batch.element_nbytes])
    flop = columns(batch).totals()[:, 1]
    moved = np.maximum(compulsory_nbytes(batch) - _CACHE_NBYTES, 0.0)
    return np.maximum(flop / flop_per_s, moved / bytes_per_s)


def compulsory_nbytes(batch: ShapeBatch) -> NDArray[np.float64]:
    """Return the bytes of each row that no kernel can save: one pass in and one out, of those that
    laws count.

    0 for kinds whose tensors a better kernel keeps on the chip: attention scores, layers, experts.

    >>> loss = Operator(kind=OperatorKind.LOSS, phase=Phase.FORWARD, shape=(4, 8), element_nbytes=2)
    >>> compulsory_nbytes(batch_of([loss])).tolist()
    [64.0]
    """
    if batch.kind in _ON_CHIP:
        return np.zeros(len(batch))
    is_forward = batch.phase in (Phase.FORWARD, Phase.RECOMPUTE, Phase.STEP)
    passes = KINDS[batch.kind].passes[not is_forward]
    needed = 1.0 if batch.kind is OperatorKind.LOSS else 2.0
    frac = min(needed / passes, 1.0) if passes else _OF_PRODUCTS_FRAC
    nbytes = columns(batch).amounts[:, 2]
    return np.asarray(frac * nbytes, dtype=np.float64)


_CACHE_NBYTES = float(2**28)
"""Last-level cache of the MI300X (AMD's data sheet), the largest of the cards here: so many bytes
may still be cached from the previous operator."""
_OF_PRODUCTS_FRAC = 0.5
"""Compulsory share for products and the optimizer: gradients and moments may be half as wide as
laws count."""
_ON_CHIP = frozenset({OperatorKind.CORE_ATTENTION, OperatorKind.LAYER, OperatorKind.EXPERTS})
_FLOP_PER_BYTE = 150.0
"""Ratio of the two ceilings of data-centre GPUs, to the nearest fifty."""


def work(operator: Operator) -> Work:
    """Return the FLOP and bytes of one operator."""
    _, flop, nbytes = columns(batch_of([operator])).totals()[0].tolist()
    return Work(flop=flop, nbytes=nbytes)
