"""Base times of a layout's items, where laws of public tables do not fit by the bytes they move."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import numpy as np

from ..timeline.compiled import Compiled
from ..timeline.items import Floats
from ..workload.config import Fp8Recipe, PositionEmbedding
from ..workload.operators import Operator, OperatorKind, Phase
from .base_times import BaseTimes

OPTIMIZER_NBYTES = 40.0
"""Traffic of fused mixed-precision Adam for one parameter: fp32 weight and two moments read and
written (24), gradient read for the norm and for the update and zeroed (12), half-precision copy
written, and half of them read back (4)."""
_FASTEST_S = 1e-7
_FP4_FRAC = 0.6
"""Peak ratio 0.5, and kernels that reach less of it."""


def base_times_s(compiled: Compiled, base: BaseTimes) -> Floats:
    """Median seconds of each item, shape (items,).

    Unless measured, an optimizer has no launches of its own, which a step's host constant holds;
    and what stands between the product of queries, keys and values and attention costs no more than
    a copy in models that rotate nothing there.
    """
    out = base.times_s(compiled.items)
    bytes_per_s = base.machine.prior.ceilings.bytes_per_s
    splits = _splits(compiled)
    for place, item in enumerate(compiled.items):
        if not isinstance(item, Operator) or _is_measured(base, item):
            continue
        if item.kind is OperatorKind.OPTIMIZER:
            out[place] = max(_FASTEST_S, item.shape[0] * OPTIMIZER_NBYTES / bytes_per_s)
        elif item in splits:
            # Forwards they are views; backwards one copy joins the three gradients.
            is_copied = item.phase is Phase.BACKWARD
            nbytes = 2 * is_copied * math.prod(item.shape) * item.element_nbytes
            out[place] = max(_FASTEST_S, nbytes / bytes_per_s)
    for places, factor in _quantized(compiled):
        narrow = [replace(cast(Operator, compiled.items[p]), element_nbytes=1) for p in places]
        casts = np.array([_cast_nbytes(operator) for operator in narrow]) / bytes_per_s
        out[places] = factor * base.times_s(narrow) + casts
    return out


def _quantized(compiled: Compiled) -> list[tuple[list[int], float]]:
    """Products that run in 8 or 4 bits, by place, with their time over that in 8 bits.

    Megatron leaves the logits in 16 bits.  Products of 4 bits have twice the peak of those of 8.
    """
    index = {item: place for place, item in enumerate(compiled.items)}
    found: dict[float, dict[int, None]] = {}
    for block, config in zip(compiled.blocks, compiled.block_configs, strict=True):
        if config.fp8 is Fp8Recipe.NONE:
            continue
        places = found.setdefault(_FP4_FRAC if config.fp8 is Fp8Recipe.NVFP4 else 1.0, {})
        for operator, _ in block.operators:
            if operator.kind.is_linear and operator.kind is not OperatorKind.LOGITS:
                places[index[operator]] = None
    return [(list(places), factor) for factor, places in found.items()]


def _cast_nbytes(operator: Operator) -> float:
    """Traffic of quantising what a product reads: 2 bytes in, the values and their transpose out.

    Forwards that is the input, backwards the gradient of the output; weights are kept.
    """
    tokens, num_in, num_out = operator.shape
    return 4.0 * tokens * (num_out if operator.phase is Phase.BACKWARD else num_in)


def _is_measured(base: BaseTimes, operator: Operator) -> bool:
    name = f"{operator.kind.value}/{operator.phase.value}"
    return any(pool == name or pool.startswith(f"{name}/") for pool in base.machine.pools)


def _splits(compiled: Compiled) -> set[Operator]:
    """Operators before attention in models without rotary embeddings."""
    return {
        operator
        for block, config in zip(compiled.blocks, compiled.block_configs, strict=True)
        if config.model.position_embedding is not PositionEmbedding.ROPE
        for operator, _ in block.operators
        if operator.kind is OperatorKind.POSITION
    }
