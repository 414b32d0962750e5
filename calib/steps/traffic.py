"""Base times of a layout's items, where laws of public tables do not fit by the bytes they move."""

from __future__ import annotations

import math

from ..timeline.compiled import Compiled
from ..timeline.items import Floats
from ..workload.config import PositionEmbedding
from ..workload.operators import Operator, OperatorKind, Phase
from .base_times import BaseTimes

OPTIMIZER_NBYTES = 40.0
"""Traffic of fused mixed-precision Adam for one parameter: fp32 weight and two moments read and
written (24), gradient read for the norm and for the update and zeroed (12), half-precision copy
written, and half of them read back (4)."""
_FASTEST_S = 1e-7


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
    return out


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
