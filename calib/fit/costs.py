"""FLOP, bytes and launches of every operator kind, over arrays of shapes.

Memory passes (how often an operator reads or writes its tensor) and launches (eager calls of the
framework) are counted from the operations of Megatron-core 0.16 and of the eager code that public
measurements ran; rates and what differs on a machine are fitted on top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ..workload.operators import OperatorKind, Phase
from .batches import ShapeBatch

Vector = NDArray[np.float64]
Product = tuple[Vector, Vector, Vector]
"""Rows, inner size and columns of a matrix product."""

_FP32_NBYTES = 4.0
_TILE = 128
"""Rows and columns of a product that one block of threads computes."""
_HEAD_TILE = 32
"""Multiple to which fused attention pads the channels of a head."""
_WAVE_POWER = 0.9
"""How much of the units that the last wave of attention's blocks leaves idle costs time."""


class WorkKind(Enum):
    """What a column of a law counts."""

    LAUNCH = "launch"
    FLOP = "flop"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """What the rows of a batch do; several columns of one cost differ in their dependence on size.

    The first three are launches, FLOP and bytes in this order.
    """

    costs: tuple[WorkKind, ...]
    amounts: NDArray[np.float64]
    """``(rows, columns)``."""

    def totals(self) -> NDArray[np.float64]:
        """Launches, FLOP and bytes, ``(rows, 3)``."""
        return np.column_stack(
            [
                self.amounts[:, [c is cost for c in self.costs]].sum(axis=1)
                for cost in (WorkKind.LAUNCH, WorkKind.FLOP, WorkKind.BYTES)
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """Reads and writes of one element, and eager framework calls, forward and backward."""

    forward: float
    backward: float
    forward_launches: int
    backward_launches: int

    def of(self, phase: Phase) -> tuple[float, int]:
        """Passes and launches of a phase; a gradient alone counts as the whole backward."""
        if phase in (Phase.BACKWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT):
            return self.backward, self.backward_launches
        return self.forward, self.forward_launches


def _counted(forward: float, backward: float, launches: tuple[int, int]) -> _Passes:
    return _Passes(
        forward=forward,
        backward=backward,
        forward_launches=launches[0],
        backward_launches=launches[1],
    )


_PASSES = {
    # Forward masks ids, looks up, masks rows; backward sorts the ids and adds rows.
    OperatorKind.EMBEDDING: _counted(6, 6, (22, 13)),
    OperatorKind.NORM: _counted(3, 6, (3, 5)),
    # Rotation of q and k, each x cos + rotate(x) sin: two products, negation of a half,
    # concatenation, sum: ten passes each; a chain's backward moves twice what its forward moved.
    OperatorKind.POSITION: _counted(20, 40, (11, 3)),
    OperatorKind.ROTARY: _counted(20, 40, (12, 26)),
    OperatorKind.RESIDUAL: _counted(6, 6, (18, 5)),
    OperatorKind.ACTIVATION: _counted(2, 3, (9, 8)),
    # fp32 copies of two-byte logits: maximum, subtraction, exponential, sum, division; in place.
    OperatorKind.LOSS: _counted(16, 5, (43, 13)),
    # Scores of unfused attention: fill-mask and softmax, plus what the two products read and write.
    OperatorKind.CORE_ATTENTION: _counted(11.8, 28.3, (35, 13)),
    OperatorKind.MASK: _counted(4, 16, (2, 6)),
    OperatorKind.SOFTMAX: _counted(3, 5, (1, 1)),
    OperatorKind.FUSED_SOFTMAX: _counted(2, 3, (1, 1)),
    # Square, mean, root, division and scale one after the other, partly in fp32.
    OperatorKind.RMS_NORM: _counted(10, 40, (6, 20)),
    OperatorKind.ELEMENTWISE: _counted(2, 3, (1, 1)),
    OperatorKind.PERMUTE: _counted(2, 2, (3, 3)),
}
NUM_SIZES = {
    **{kind: 3 for kind in OperatorKind if kind.is_linear},
    OperatorKind.EMBEDDING: 3,
    OperatorKind.NORM: 2,
    OperatorKind.POSITION: 2,
    OperatorKind.CORE_ATTENTION: 5,
    OperatorKind.RESIDUAL: 2,
    OperatorKind.ACTIVATION: 3,
    OperatorKind.LOSS: 2,
    OperatorKind.OPTIMIZER: 1,
    OperatorKind.HOST_MICROBATCH: 0,
    OperatorKind.HOST_STEP: 0,
    OperatorKind.BATCHED_PRODUCT: 4,
    OperatorKind.GROUPED_LINEAR: 4,
    OperatorKind.FLASH_ATTENTION: 6,
    OperatorKind.MASK: 2,
    OperatorKind.SOFTMAX: 2,
    OperatorKind.FUSED_SOFTMAX: 3,
    OperatorKind.RMS_NORM: 2,
    OperatorKind.ROTARY: 4,
    OperatorKind.ELEMENTWISE: 2,
    OperatorKind.ROUTER: 3,
    OperatorKind.PERMUTE: 3,
    OperatorKind.EXPERTS: 6,
    OperatorKind.LAYER: 5,
}
"""Sizes in the canonical shape of each kind."""
# Adam reads parameter, gradient and two moments and writes three of them; clipping reads the
# gradient once more and zeroing it writes it: nine fp32 passes.
_OPTIMIZER_PASSES = 9.0
_OPTIMIZER_FLOP = 14.0
# A loop over some fifty parameter tensors; their number does not show in the operator's shape.
_OPTIMIZER_LAUNCHES = 400
_LINEAR_LAUNCHES = 7
_LINEAR_BACKWARD_LAUNCHES = 9
_SORTED_IDS = 3072
"""Ids above which the embedding's backward sorts them first (PyTorch's CUDA kernel)."""
_SORT_LAUNCHES = 120
_LAYER_PASSES = 34.0
"""Activation bytes of a layer over tokens x hidden (Korthikanti et al., 2022, section 4.1)."""


def products(batch: ShapeBatch) -> list[Product]:
    """The matrix products of a linear or batched product in its phase."""
    rows, inner, cols = batch.sizes.T[-3:]
    forward, dgrad, wgrad = (rows, inner, cols), (rows, cols, inner), (inner, rows, cols)
    if batch.phase is Phase.BACKWARD:
        return [dgrad, wgrad]
    if batch.phase is Phase.INPUT_GRADIENT:
        return [dgrad]
    return [wgrad] if batch.phase is Phase.WEIGHT_GRADIENT else [forward]


def _up(values: Vector, multiple: int) -> Vector:
    return np.ceil(values / multiple) * multiple


def _three(launches: float | Vector, flop: float | Vector, nbytes: float | Vector) -> Columns:
    rows = np.broadcast_arrays(np.atleast_1d(launches), np.atleast_1d(flop), np.atleast_1d(nbytes))
    return Columns(
        costs=(WorkKind.LAUNCH, WorkKind.FLOP, WorkKind.BYTES),
        amounts=np.column_stack([np.asarray(r, dtype=np.float64) for r in rows]),
    )


def _more(found: Columns, *extra: tuple[WorkKind, Vector]) -> Columns:
    return Columns(
        costs=(*found.costs, *(cost for cost, _ in extra)),
        amounts=np.column_stack([found.amounts, *(amount for _, amount in extra)]),
    )


def linear(batch: ShapeBatch, num_units: int) -> Columns:
    """A weight gradient is added into an fp32 buffer."""
    tokens, size_in, size_out = batch.sizes.T
    done = products(batch)
    flop = len(done) * 2.0 * tokens * size_in * size_out
    nbytes = len(done) * batch.element_nbytes * tokens * (size_in + size_out)
    if batch.phase is not Phase.WEIGHT_GRADIENT:
        nbytes = nbytes + batch.element_nbytes * size_in * size_out
    if batch.phase in (Phase.BACKWARD, Phase.WEIGHT_GRADIENT):
        nbytes = nbytes + 2 * _FP32_NBYTES * size_in * size_out
    return _three(_LINEAR_BACKWARD_LAUNCHES if len(done) > 1 else _LINEAR_LAUNCHES, flop, nbytes)


def _batched(batch: ShapeBatch, num_units: int) -> Columns:
    """Rows and columns of each result count in whole tiles on a GPU."""
    number, tile = batch.sizes[:, 0], _TILE if num_units else 1
    flop, nbytes = np.zeros(len(batch)), np.zeros(len(batch))
    done = products(batch)
    for rows, inner, cols in done:
        flop = flop + 2.0 * number * _up(rows, tile) * _up(cols, tile) * inner
        nbytes = nbytes + number * (rows * inner + inner * cols + rows * cols)
    return _three(len(done), flop, batch.element_nbytes * nbytes)


def _grouped(batch: ShapeBatch, num_units: int) -> Columns:
    experts, tokens, size_in, size_out = batch.sizes.T
    number = 2.0 if batch.phase is Phase.BACKWARD else 1.0
    nbytes = tokens * (size_in + size_out) + experts * size_in * size_out
    flop = number * 2.0 * tokens * size_in * size_out
    return _three(number * experts, flop, number * batch.element_nbytes * nbytes)


def _flash(batch: ShapeBatch, num_units: int) -> Columns:
    """Half of the square of scores (causal); backward computes the scores again: 2.5 times.

    A block of threads takes the rows of one tile of one head, the longest of which last as long as
    the wave: with few blocks a GPU is never full.
    """
    number, heads, groups, seq, key, value = batch.sizes.T
    tile = _HEAD_TILE if num_units else 1
    again = 2.5 if batch.phase is Phase.BACKWARD else 1.0
    flop = again * number * heads * seq**2 * (_up(key, tile) + _up(value, tile))
    if num_units:
        waves = number * heads * np.ceil(seq / _TILE) / num_units
        flop = flop * (np.ceil(waves) / waves) ** _WAVE_POWER
    elements = number * seq * (heads + groups) * (key + value)
    passes, launches = (2.0, 3) if batch.phase is Phase.BACKWARD else (1.0, 1)
    return _three(launches, flop, batch.element_nbytes * passes * elements)


def _attention(batch: ShapeBatch, num_units: int) -> Columns:
    """Two products over the full square of scores: the mask is applied, not skipped."""
    number, heads, groups, seq, channels = batch.sizes.T
    scores = number * heads * seq * seq
    inputs = number * seq * channels * (2 * heads + 2 * groups)
    passes, launches = _PASSES[batch.kind].of(batch.phase)
    num_products = 4 if batch.phase is Phase.BACKWARD else 2
    nbytes = batch.element_nbytes * (passes * scores + num_products / 2 * inputs)
    return _three(launches, num_products * 2.0 * scores * channels, nbytes)


def _embedding(batch: ShapeBatch, num_units: int) -> Columns:
    """Backward also fills a dense gradient of the table and adds it into the fp32 buffer."""
    tokens, hidden, vocab = batch.sizes.T
    passes, launches = _PASSES[batch.kind].of(batch.phase)
    found = _three(launches, 0.0, batch.element_nbytes * passes * tokens * hidden)
    if batch.phase is not Phase.BACKWARD:
        return found
    table = (2 * batch.element_nbytes + 2 * _FP32_NBYTES) * vocab * hidden
    sorts = np.where(tokens > _SORTED_IDS, float(_SORT_LAUNCHES if num_units else 0), 0.0)
    return _more(found, (WorkKind.BYTES, table), (WorkKind.LAUNCH, sorts))


def _activation(batch: ShapeBatch, num_units: int) -> Columns:
    tokens, size_in, size_out = batch.sizes.T
    passes, launches = _PASSES[batch.kind].of(batch.phase)
    return _three(launches, 0.0, batch.element_nbytes * passes * tokens * (size_in + size_out) / 2)


def _optimizer(batch: ShapeBatch, num_units: int) -> Columns:
    parameters = batch.sizes[:, 0]
    nbytes = _OPTIMIZER_PASSES * _FP32_NBYTES * parameters
    halves = np.where(batch.element_nbytes < _FP32_NBYTES, 2.0 * batch.element_nbytes, 0.0)
    return _three(_OPTIMIZER_LAUNCHES, _OPTIMIZER_FLOP * parameters, nbytes + halves * parameters)


def _host(batch: ShapeBatch, num_units: int) -> Columns:
    return _three(np.ones(len(batch)), 0.0, 0.0)


def _router(batch: ShapeBatch, num_units: int) -> Columns:
    tokens, hidden, experts = batch.sizes.T
    number = 2.0 if batch.phase is Phase.BACKWARD else 1.0
    nbytes = batch.element_nbytes * tokens * hidden + 6 * _FP32_NBYTES * tokens * experts
    return _three(12.0, number * 2.0 * tokens * hidden * experts, number * nbytes)


def _permute(batch: ShapeBatch, num_units: int) -> Columns:
    tokens, hidden, copies = batch.sizes.T
    _, launches = _PASSES[batch.kind].of(batch.phase)
    return _three(launches, 0.0, batch.element_nbytes * tokens * hidden * (1 + copies))


def _experts(batch: ShapeBatch, num_units: int) -> Columns:
    """Gated two-layer networks of the experts here, for the share of tokens routed to them."""
    tokens, hidden, ffn, top, here, overall = batch.sizes.T
    routed = tokens * top * here / overall
    # Experts that get at least one token, were they drawn evenly.
    awake = here * (1.0 - (1.0 - 1.0 / overall) ** (tokens * top))
    # Each expert's rows fill whole tiles: a quarter of one is idle on average.
    padded = routed + (_TILE / 4 * awake if num_units else 0.0)
    flop = 6.0 * padded * hidden * ffn
    activations = routed * (2 * hidden + 4 * ffn)
    return _more(
        _three(6.0, flop, batch.element_nbytes * activations),
        (WorkKind.BYTES, 3.0 * batch.element_nbytes * awake * hidden * ffn),
    )


def _layer(batch: ShapeBatch, num_units: int) -> Columns:
    """A layer with a feed-forward of four times its width, without recomputing."""
    number, _, seq, hidden, tp = batch.sizes.T
    tokens = number * seq
    again = 2.0 if batch.phase is Phase.BACKWARD else 1.0
    flop = again * (24.0 * tokens * hidden**2 + 4.0 * tokens * seq * hidden) / tp
    weight = 12.0 * hidden**2 / tp
    nbytes = again * batch.element_nbytes * (_LAYER_PASSES / 2 * tokens * hidden + weight)
    return _three(60.0 * again, flop, nbytes)


def _softmax(batch: ShapeBatch, num_units: int) -> Columns:
    """A fused kernel works on rows padded to the next power of two."""
    number, rows, cols = batch.sizes.T
    passes, launches = _PASSES[batch.kind].of(batch.phase)
    width = batch.element_nbytes * passes / 2
    padded = 2.0 ** np.ceil(np.log2(cols)) if num_units else cols
    found = _three(launches, 0.0, width * number * rows * cols)
    return _more(found, (WorkKind.BYTES, width * number * rows * padded))


def memory(batch: ShapeBatch, num_units: int) -> Columns:
    passes, launches = _PASSES[batch.kind].of(batch.phase)
    return _three(launches, 0.0, batch.element_nbytes * passes * batch.sizes.prod(axis=1))


LAWS: dict[OperatorKind, Callable[[ShapeBatch, int], Columns]] = {
    OperatorKind.CORE_ATTENTION: _attention,
    OperatorKind.EMBEDDING: _embedding,
    OperatorKind.ACTIVATION: _activation,
    OperatorKind.OPTIMIZER: _optimizer,
    OperatorKind.HOST_MICROBATCH: _host,
    OperatorKind.HOST_STEP: _host,
    OperatorKind.BATCHED_PRODUCT: _batched,
    OperatorKind.GROUPED_LINEAR: _grouped,
    OperatorKind.FLASH_ATTENTION: _flash,
    OperatorKind.FUSED_SOFTMAX: _softmax,
    OperatorKind.ROUTER: _router,
    OperatorKind.PERMUTE: _permute,
    OperatorKind.EXPERTS: _experts,
    OperatorKind.LAYER: _layer,
}
