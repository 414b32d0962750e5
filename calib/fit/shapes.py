"""Shapes as numbers that regressors see: where a shape lies, and what its tiles leave idle."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..workload.operators import OperatorKind
from .batches import ShapeBatch
from .operator_kinds import products

Vector = NDArray[np.float64]
_TILES = ((128, 256), (128, 128))
"""Rows and columns of the blocks that matrix kernels commonly compute."""
_ATTENTION_ROWS = 128
"""Rows of queries that a block of fused attention takes."""
_HEAD_TILE = 32
"""Multiple to which it pads the channels of a head."""
_STEP = 0.3
"""Size of a yes-or-no feature, so that one prior suits it and the others."""
_MOST_HALVINGS = 8
"""Alignment beyond 256 elements changes no kernel."""


def coordinates(batch: ShapeBatch) -> NDArray[np.float64]:
    """Log2 of each size and of the element's bytes, ``(rows, sizes + 1)``."""
    return np.log2(np.column_stack([np.maximum(batch.sizes, 1.0), batch.element_nbytes]))


def halvings(batch: ShapeBatch) -> NDArray[np.float64]:
    """How often each size can be halved, at most 8: what alignment depends on, ``(rows, sizes)``.

    >>> from .batches import batch_of
    >>> from ..workload.operators import Operator, Phase
    >>> norm = Operator(kind=OperatorKind.NORM, phase=Phase.FORWARD, shape=(8, 6), element_nbytes=2)
    >>> halvings(batch_of([norm])).tolist()
    [[3.0, 1.0]]
    """
    whole = np.maximum(np.rint(batch.sizes), 1.0).astype(np.int64)
    return np.minimum(np.log2((whole & -whole).astype(np.float64)), _MOST_HALVINGS)


def trend(batch: ShapeBatch, num_units: int | None) -> NDArray[np.float64]:
    """Features in which log time moves about linearly, ``(rows, features)``; none off a GPU."""
    none = np.zeros((len(batch), 0))
    if not num_units:
        return none
    kind, sizes = batch.kind, batch.sizes
    if kind.is_linear or kind is OperatorKind.BATCHED_PRODUCT:
        number = np.ones(len(batch)) if kind.is_linear else sizes[:, 0]
        return _product_waves(batch, number, num_units)
    if kind is OperatorKind.FLASH_ATTENTION:
        number, heads, _, seq, key, _ = sizes.T
        blocks = number * heads * np.ceil(seq / _ATTENTION_ROWS)
        flags = [key % _HEAD_TILE > 0, key < 64, key > 128]
        return np.column_stack([idle_waves(blocks, num_units), *(_STEP * f for f in flags)])
    if kind in (OperatorKind.SOFTMAX, OperatorKind.FUSED_SOFTMAX):
        padded = np.exp2(np.ceil(np.log2(sizes[:, -1:])))
        return np.asarray(_STEP * (padded > sizes[:, -1:]), dtype=np.float64)
    if kind is OperatorKind.ROTARY:
        return np.asarray(_STEP * (sizes[:, -1:] % 64 > 0), dtype=np.float64)
    return none


def idle_waves(blocks: Vector, num_units: int) -> Vector:
    """Log of whole waves over the waves that the blocks fill: the last wave's idle units.

    >>> idle_waves(np.array([108.0, 162.0]), 108).round(3).tolist()
    [0.0, 0.288]
    """
    waves = blocks / num_units
    return np.asarray(np.log(np.ceil(waves) / waves), dtype=np.float64)


def _product_waves(batch: ShapeBatch, number: Vector, num_units: int) -> NDArray[np.float64]:
    done = products(batch)
    return np.column_stack(
        [
            sum(
                idle_waves(number * np.ceil(rows / high) * np.ceil(cols / wide), num_units)
                for rows, _, cols in done
            )
            / len(done)
            for high, wide in _TILES
        ]
    )
