"""FLOP, bytes and launches of every operator kind, over arrays of shapes.

Memory passes (how often an operator reads or writes its tensor) and launches (eager calls of the
framework) are counted from the operations of Megatron-core 0.16 and of the eager code that public
measurements ran; rates and machine-specific factors are fitted on top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
"""Rows and columns of the output tile that one thread block computes."""
_HEAD_TILE = 32
"""Multiple to which fused attention pads the channels of a head."""
_WAVE_POWER = 0.9
"""Exponent of the time lost to units that the last wave of attention's blocks leaves idle."""


class OperatorFamily(Enum):
    """Operators with a common error: if some are slower than estimated, so are the others."""

    LINEAR = "linear"
    ATTENTION = "attention"
    MEMORY = "memory"
    OPTIMIZER = "optimizer"
    HOST = "host"
    OPAQUE = "opaque"


class WorkKind(Enum):
    """Unit that a column of a law counts."""

    LAUNCH = "launch"
    FLOP = "flop"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Work of the rows of a batch; columns of the same cost differ in their dependence on size.

    The first three are launches, FLOP and bytes in this order.
    """

    costs: tuple[WorkKind, ...]
    amounts: NDArray[np.float64]
    """``(rows, columns)``."""

    def totals(self) -> NDArray[np.float64]:
        """Return launches, FLOP and bytes, ``(rows, 3)``."""
        return np.column_stack(
            [
                self.amounts[:, [c is cost for c in self.costs]].sum(axis=1)
                for cost in (WorkKind.LAUNCH, WorkKind.FLOP, WorkKind.BYTES)
            ]
        )


# Adam reads parameter, gradient and two moments and writes three of them; clipping reads the
# gradient once more and zeroing it writes it: nine fp32 passes.
_OPTIMIZER_PASSES = 9.0
_OPTIMIZER_FLOP = 14.0
"""FLOP of Adam with weight decay per parameter."""
# A loop over some fifty parameter tensors, whose number is not part of the operator's shape.
_OPTIMIZER_LAUNCHES = 400
SHARDED_CALL_LAUNCHES = 15.0
"""Additional eager launches of one call on a DTensor over a call on a plain tensor. AdamW over 8 to
128 tensors of 16 elements, quiet processor, torch 2.13: 110 to 140 us per tensor for its eight
calls one by one, 17 to 23 us batched (foreach, fused), at 1.1 us a launch."""
SHARD_UNIT_LAUNCHES = 300.0
"""Host launches that FSDP2 adds to one pass of a unit: 230 to 310 us forward, 310 to 430 us
backward (units of 4 and of 10 tensors, one rank, as above)."""
HOST_UPDATE_NBYTES = 3000.0
"""Bytes that an H100 moves while its share of a host updates one parameter (``steps/_scales``): 28
bytes at 38 GB/s and 8 at 50, times 3.35 TB/s."""
_LINEAR_LAUNCHES = 7
"""Eager calls around a product in Megatron's linear layer, forward."""
_LINEAR_BACKWARD_LAUNCHES = 9
"""Eager calls in its backward, with the sum into the fp32 buffer."""
_SORTED_IDS = 3072
"""Ids above which the embedding's backward sorts them first (PyTorch's CUDA kernel)."""
_SORT_LAUNCHES = 120
"""Launches that sorting adds."""
_CACHED_NBYTES, _UNCACHED_NBYTES, _UNCACHED_FACTOR = 2.0**18, 2.0**20, 2.0
"""Tensor size up to which a core's cache of 1 to 2 MiB holds an operator's inputs and output, size
from which it holds none, and the factor on byte time above it. Sums of two tensors run at a third
of their rate from 1 MiB on, GELU and softmax at full rate (benchmarks/RESULTS.md,
2026-11-26): half of a mixed operator is of the first sort."""
_LAYER_PASSES = 34.0
"""Activation bytes of a layer over tokens x hidden (Korthikanti et al., 2022, section 4.1)."""


def products(batch: ShapeBatch) -> list[Product]:
    """Return the matrix products of a linear or batched product in its phase."""
    rows, inner, cols = batch.sizes.T[-3:]
    forward, dgrad, wgrad = (rows, inner, cols), (rows, cols, inner), (inner, rows, cols)
    if batch.phase is Phase.BACKWARD:
        return [dgrad, wgrad]
    if batch.phase is Phase.INPUT_GRADIENT:
        return [dgrad]
    return [wgrad] if batch.phase is Phase.WEIGHT_GRADIENT else [forward]


def _passes(batch: ShapeBatch) -> tuple[float, int]:
    """Return passes over the tensor, and launches; a gradient alone counts as the whole
    backward."""
    forward = batch.phase in (Phase.FORWARD, Phase.RECOMPUTE, Phase.STEP)
    kind_law = KINDS[batch.kind]
    return kind_law.passes[not forward], kind_law.launches[not forward]


def _round_up(values: Vector, multiple: int) -> Vector:
    return np.ceil(values / multiple) * multiple


def _work_columns(
    launches: float | Vector, flop: float | Vector, nbytes: float | Vector
) -> Columns:
    rows = np.broadcast_arrays(np.atleast_1d(launches), np.atleast_1d(flop), np.atleast_1d(nbytes))
    return Columns(
        costs=(WorkKind.LAUNCH, WorkKind.FLOP, WorkKind.BYTES),
        amounts=np.column_stack([np.asarray(r, dtype=np.float64) for r in rows]),
    )


def _with_columns(columns: Columns, *extra: tuple[WorkKind, Vector]) -> Columns:
    return Columns(
        costs=(*columns.costs, *(cost for cost, _ in extra)),
        amounts=np.column_stack([columns.amounts, *(amount for _, amount in extra)]),
    )


def _linear(batch: ShapeBatch, num_units: int) -> Columns:
    """Count a product; a weight gradient is added into an fp32 buffer."""
    tokens, size_in, size_out = batch.sizes.T
    done = products(batch)
    flop = len(done) * 2.0 * tokens * size_in * size_out
    nbytes = len(done) * batch.element_nbytes * tokens * (size_in + size_out)
    if batch.phase is not Phase.WEIGHT_GRADIENT:
        nbytes = nbytes + batch.element_nbytes * size_in * size_out
    if batch.phase in (Phase.BACKWARD, Phase.WEIGHT_GRADIENT):
        nbytes = nbytes + 2 * _FP32_NBYTES * size_in * size_out
    return _work_columns(
        _LINEAR_BACKWARD_LAUNCHES if len(done) > 1 else _LINEAR_LAUNCHES, flop, nbytes
    )


def _batched(batch: ShapeBatch, num_units: int) -> Columns:
    """Count batched products; on a GPU, rows and columns of each result are padded to whole
    tiles."""
    number, tile = batch.sizes[:, 0], _TILE if num_units else 1
    flop, nbytes = np.zeros(len(batch)), np.zeros(len(batch))
    done = products(batch)
    for rows, inner, cols in done:
        flop = flop + 2.0 * number * _round_up(rows, tile) * _round_up(cols, tile) * inner
        nbytes = nbytes + number * (rows * inner + inner * cols + rows * cols)
    return _work_columns(len(done), flop, batch.element_nbytes * nbytes)


def _grouped(batch: ShapeBatch, num_units: int) -> Columns:
    experts, tokens, size_in, size_out = batch.sizes.T
    number = 2.0 if batch.phase is Phase.BACKWARD else 1.0
    nbytes = tokens * (size_in + size_out) + experts * size_in * size_out
    flop = number * 2.0 * tokens * size_in * size_out
    return _work_columns(number * experts, flop, number * batch.element_nbytes * nbytes)


def _flash(batch: ShapeBatch, num_units: int) -> Columns:
    """Count half of the square of scores (causal); the backward recomputes the scores: 2.5 times
    the FLOP.

    A thread block takes the rows of one tile of one head, and the longest block determines the
    duration of its wave: with few blocks a GPU is never full.
    """
    number, heads, groups, seq, key, value = batch.sizes.T
    tile = _HEAD_TILE if num_units else 1
    flop_factor = 2.5 if batch.phase is Phase.BACKWARD else 1.0
    flop = flop_factor * number * heads * seq**2 * (_round_up(key, tile) + _round_up(value, tile))
    if num_units:
        waves = number * heads * np.ceil(seq / _TILE) / num_units
        flop = flop * (np.ceil(waves) / waves) ** _WAVE_POWER
    elements = number * seq * (heads + groups) * (key + value)
    passes, launches = (2.0, 3) if batch.phase is Phase.BACKWARD else (1.0, 1)
    return _work_columns(launches, flop, batch.element_nbytes * passes * elements)


def _attention(batch: ShapeBatch, num_units: int) -> Columns:
    """Count two products over the full square of scores: the mask is applied, not skipped."""
    number, heads, groups, seq, channels = batch.sizes.T
    scores = number * heads * seq * seq
    inputs = number * seq * channels * (2 * heads + 2 * groups)
    passes, launches = _passes(batch)
    num_products = 4 if batch.phase is Phase.BACKWARD else 2
    nbytes = batch.element_nbytes * (passes * scores + num_products / 2 * inputs)
    return _work_columns(launches, num_products * 2.0 * scores * channels, nbytes)


def _embedding(batch: ShapeBatch, num_units: int) -> Columns:
    """Count a lookup; the backward also fills a dense gradient of the table and adds it into the
    fp32 buffer."""
    tokens, hidden, vocab = batch.sizes.T
    passes, launches = _passes(batch)
    columns = _work_columns(launches, 0.0, batch.element_nbytes * passes * tokens * hidden)
    if batch.phase is not Phase.BACKWARD:
        return columns
    table = (2 * batch.element_nbytes + 2 * _FP32_NBYTES) * vocab * hidden
    sorts = np.where(tokens > _SORTED_IDS, float(_SORT_LAUNCHES if num_units else 0), 0.0)
    return _with_columns(columns, (WorkKind.BYTES, table), (WorkKind.LAUNCH, sorts))


def _activation(batch: ShapeBatch, num_units: int) -> Columns:
    tokens, size_in, size_out = batch.sizes.T
    passes, launches = _passes(batch)
    return _work_columns(
        launches, 0.0, batch.element_nbytes * passes * tokens * (size_in + size_out) / 2
    )


def _optimizer(batch: ShapeBatch, num_units: int) -> Columns:
    parameters = batch.sizes[:, 0]
    nbytes = _OPTIMIZER_PASSES * _FP32_NBYTES * parameters
    low_precision_nbytes = np.where(
        batch.element_nbytes < _FP32_NBYTES, 2.0 * batch.element_nbytes, 0.0
    )
    return _work_columns(
        _OPTIMIZER_LAUNCHES,
        _OPTIMIZER_FLOP * parameters,
        nbytes + low_precision_nbytes * parameters,
    )


def _sharded_optimizer(batch: ShapeBatch, num_units: int) -> Columns:
    """Count a plain optimizer, and the host's calls on each sharded tensor."""
    plain = replace(batch, kind=OperatorKind.OPTIMIZER, sizes=batch.sizes[:, :1])
    launches, flop, nbytes = _optimizer(plain, num_units).amounts.T
    return _work_columns(launches + SHARDED_CALL_LAUNCHES * batch.sizes[:, 1], flop, nbytes)


def _stated_optimizer(batch: ShapeBatch, num_units: int) -> Columns:
    """Count by the stated bytes of the optimizer's states; parameters updated on the host count as
    ``HOST_UPDATE_NBYTES`` each."""
    parameters, moved, on_host, _ = batch.sizes.T
    on_host = np.minimum(on_host, parameters)
    nbytes = moved * (parameters - on_host) + HOST_UPDATE_NBYTES * on_host
    return _work_columns(_OPTIMIZER_LAUNCHES, _OPTIMIZER_FLOP * parameters, nbytes)


def _host(batch: ShapeBatch, num_units: int) -> Columns:
    return _work_columns(np.ones(len(batch)), 0.0, 0.0)


def _router(batch: ShapeBatch, num_units: int) -> Columns:
    tokens, hidden, experts = batch.sizes.T
    number = 2.0 if batch.phase is Phase.BACKWARD else 1.0
    nbytes = batch.element_nbytes * tokens * hidden + 6 * _FP32_NBYTES * tokens * experts
    return _work_columns(12.0, number * 2.0 * tokens * hidden * experts, number * nbytes)


def _permute(batch: ShapeBatch, num_units: int) -> Columns:
    tokens, hidden, copies = batch.sizes.T
    _, launches = _passes(batch)
    return _work_columns(launches, 0.0, batch.element_nbytes * tokens * hidden * (1 + copies))


def _experts(batch: ShapeBatch, num_units: int) -> Columns:
    """Count gated two-layer networks of the local experts, for the share of tokens routed to
    them."""
    tokens, hidden, ffn, top, here, overall = batch.sizes.T
    routed = tokens * top * here / overall
    # Expected number of experts that get at least one token, if drawn evenly.
    awake = here * (1.0 - (1.0 - 1.0 / overall) ** (tokens * top))
    # Each expert's rows fill whole tiles: a quarter of one is idle on average.
    padded = routed + (_TILE / 4 * awake if num_units else 0.0)
    flop = 6.0 * padded * hidden * ffn
    activations = routed * (2 * hidden + 4 * ffn)
    return _with_columns(
        _work_columns(6.0, flop, batch.element_nbytes * activations),
        (WorkKind.BYTES, 3.0 * batch.element_nbytes * awake * hidden * ffn),
    )


def _layer(batch: ShapeBatch, num_units: int) -> Columns:
    """Count a layer with a feed-forward of four times its width, without recompute."""
    number, _, seq, hidden, tp = batch.sizes.T
    tokens = number * seq
    pass_factor = 2.0 if batch.phase is Phase.BACKWARD else 1.0
    flop = pass_factor * (24.0 * tokens * hidden**2 + 4.0 * tokens * seq * hidden) / tp
    weight = 12.0 * hidden**2 / tp
    nbytes = pass_factor * batch.element_nbytes * (_LAYER_PASSES / 2 * tokens * hidden + weight)
    return _work_columns(60.0 * pass_factor, flop, nbytes)


def _opaque(batch: ShapeBatch, num_units: int) -> Columns:
    """Count the mixer of an opaque layer as one product: only how its work splits, not its rate."""
    tokens, numel = batch.sizes.T
    number = 2.0 if batch.phase is Phase.BACKWARD else 1.0
    return _work_columns(
        10.0 * number, number * 2.0 * tokens * numel, number * batch.element_nbytes * numel
    )


def _softmax(batch: ShapeBatch, num_units: int) -> Columns:
    """Count a softmax; a fused kernel pads rows to the next power of two."""
    number, rows, cols = batch.sizes.T
    passes, launches = _passes(batch)
    width = batch.element_nbytes * passes / 2
    padded = 2.0 ** np.ceil(np.log2(cols)) if num_units else cols
    columns = _work_columns(launches, 0.0, width * number * rows * cols)
    return _with_columns(columns, (WorkKind.BYTES, width * number * rows * padded))


def _memory(batch: ShapeBatch, num_units: int) -> Columns:
    passes, launches = _passes(batch)
    return _work_columns(launches, 0.0, batch.element_nbytes * passes * batch.sizes.prod(axis=1))


def on_processor(batch: ShapeBatch, done: Columns) -> Columns:
    """Return the batch's work on a CPU, where exponentials cost as much as many FLOP and tensors
    larger than a core's cache move more slowly."""
    passes, _ = _passes(batch)
    if not passes:
        return done
    is_forward = batch.phase in (Phase.FORWARD, Phase.RECOMPUTE, Phase.STEP)
    nbytes = done.amounts[:, 2]
    tensor_nbytes = nbytes / passes
    amounts = done.amounts.copy()
    flop = KINDS[batch.kind].processor_flop[not is_forward]
    amounts[:, 1] += flop * tensor_nbytes / batch.element_nbytes
    doublings = np.log2(np.maximum(tensor_nbytes, 1.0) / _CACHED_NBYTES)
    uncached_frac = np.clip(doublings / np.log2(_UNCACHED_NBYTES / _CACHED_NBYTES), 0.0, 1.0)
    amounts[:, 2] = nbytes * (1.0 + (_UNCACHED_FACTOR - 1.0) * uncached_frac)
    return replace(done, amounts=amounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindLaw:
    """Everything that the models assume of a kind of operator before it is measured."""

    num_sizes: int
    """Number of sizes of its canonical shape (comments of ``OperatorKind``)."""
    law: Callable[[ShapeBatch, int], Columns] = _memory
    """Function that counts the work of a batch; ``_memory`` moves ``passes`` times the tensor."""
    passes: tuple[float, float] = (0.0, 0.0)
    """Reads and writes of one element, forward and backward."""
    launches: tuple[int, int] = (0, 0)
    """Eager calls of the framework, forward and backward."""
    processor_flop: tuple[float, float] = (0.0, 0.0)
    """FLOP of a product that a CPU executes in the time of one element's exponential or error
    function, forward and backward: 91 to 152 and 293 to 544 for GELU, 76 to 158 and 183 to 311 for
    SiLU, 115 to 224 and 139 to 215 for softmax (benchmarks/RESULTS.md, six runs of
    2026-11-26; the values below are from the medians of the first three)."""
    family: OperatorFamily = OperatorFamily.MEMORY
    is_chain: bool = False
    """True for many small calls in a row, alternately launch- and bandwidth-bound."""


def _product(num_sizes: int, law: Callable[[ShapeBatch, int], Columns]) -> KindLaw:
    return KindLaw(num_sizes=num_sizes, law=law, family=OperatorFamily.LINEAR)


_ATTENTION, _LINEAR = OperatorFamily.ATTENTION, _product(3, _linear)
_HOST = KindLaw(num_sizes=0, law=_host, family=OperatorFamily.HOST)

KINDS: Mapping[OperatorKind, KindLaw] = {
    **{kind: _LINEAR for kind in OperatorKind if kind.is_linear},
    # Forward masks ids, looks up, masks rows; backward sorts the ids and adds rows.
    OperatorKind.EMBEDDING: KindLaw(num_sizes=3, law=_embedding, passes=(6, 6), launches=(22, 13)),
    OperatorKind.NORM: KindLaw(num_sizes=2, passes=(3, 6), launches=(3, 5)),
    # Rotation of q and k, each x cos + rotate(x) sin: two products, negation of a half,
    # concatenation, sum: ten passes each; a chain's backward moves twice what its forward moved.
    OperatorKind.POSITION: KindLaw(num_sizes=2, passes=(20, 40), launches=(11, 3), is_chain=True),
    OperatorKind.ROTARY: KindLaw(num_sizes=4, passes=(20, 40), launches=(12, 26), is_chain=True),
    OperatorKind.RESIDUAL: KindLaw(num_sizes=2, passes=(6, 6), launches=(18, 5)),
    OperatorKind.ACTIVATION: KindLaw(
        num_sizes=3, law=_activation, passes=(2, 3), launches=(9, 8), processor_flop=(120, 350)
    ),
    # fp32 copies of two-byte logits: maximum, subtraction, exponential, sum, division; in place.
    OperatorKind.LOSS: KindLaw(
        num_sizes=2, passes=(16, 5), launches=(43, 13), processor_flop=(130, 0)
    ),
    # Scores of unfused attention: fill-mask and softmax, plus what the two products read and write.
    OperatorKind.CORE_ATTENTION: KindLaw(
        num_sizes=5,
        law=_attention,
        passes=(11.8, 28.3),
        launches=(35, 13),
        processor_flop=(130, 150),
        family=_ATTENTION,
    ),
    OperatorKind.MASK: KindLaw(num_sizes=2, passes=(4, 16), launches=(2, 6)),
    OperatorKind.SOFTMAX: KindLaw(
        num_sizes=2, passes=(3, 5), launches=(1, 1), processor_flop=(130, 150)
    ),
    OperatorKind.FUSED_SOFTMAX: KindLaw(num_sizes=3, law=_softmax, passes=(2, 3), launches=(1, 1)),
    # Square, mean, root, division and scale in sequence, partly in fp32.
    OperatorKind.RMS_NORM: KindLaw(num_sizes=2, passes=(10, 40), launches=(6, 20)),
    # One kernel, which reads and writes; backward reads input and gradient, writes a gradient.
    OperatorKind.FUSED_NORM: KindLaw(num_sizes=2, passes=(2, 3), launches=(1, 1)),
    OperatorKind.ELEMENTWISE: KindLaw(num_sizes=2, passes=(2, 3), launches=(1, 1)),
    OperatorKind.PERMUTE: KindLaw(num_sizes=3, law=_permute, launches=(3, 3)),
    # ``network/cluster.host_copy_s`` models the time on the link to the host.
    OperatorKind.HOST_COPY: KindLaw(num_sizes=1, passes=(1, 1), launches=(1, 1)),
    OperatorKind.OPTIMIZER: KindLaw(num_sizes=1, law=_optimizer, family=OperatorFamily.OPTIMIZER),
    OperatorKind.SHARDED_OPTIMIZER: KindLaw(
        num_sizes=2, law=_sharded_optimizer, family=OperatorFamily.OPTIMIZER
    ),
    OperatorKind.STATED_OPTIMIZER: KindLaw(
        num_sizes=4, law=_stated_optimizer, family=OperatorFamily.OPTIMIZER
    ),
    OperatorKind.SHARD_UNIT: _HOST,
    OperatorKind.HOST_MICROBATCH: _HOST,
    OperatorKind.HOST_STEP: _HOST,
    OperatorKind.BATCHED_PRODUCT: KindLaw(num_sizes=4, law=_batched, family=_ATTENTION),
    OperatorKind.FLASH_ATTENTION: KindLaw(num_sizes=6, law=_flash, family=_ATTENTION),
    OperatorKind.GROUPED_LINEAR: _product(4, _grouped),
    OperatorKind.ROUTER: _product(3, _router),
    OperatorKind.EXPERTS: _product(6, _experts),
    OperatorKind.LAYER: _product(5, _layer),
    **{
        kind: KindLaw(num_sizes=2, law=_opaque, family=OperatorFamily.OPAQUE)
        for kind in OperatorKind
        if kind.is_opaque
    },
}
"""The only place to register a kind; docs/extending/operator_kind.md adds one."""
