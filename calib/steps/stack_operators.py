"""Operators as the stack of a layout runs them, where tables have them under names of their own."""

from __future__ import annotations

from dataclasses import replace

from ..workload.config import Normalization, PositionEmbedding, RunConfig
from ..workload.operators import Operator, OperatorKind, Phase
from .base_times import BaseTimes

Kind = OperatorKind


def stack_operators(operator: Operator, config: RunConfig, base: BaseTimes) -> tuple[Operator, ...]:
    """What was timed in place of an operator of a layout; itself where nothing else was.

    Eager stacks run RMSNorm and rotation as chains of calls, and unfused attention with scale, mask
    and softmax apart.
    """
    model, phase = config.model, operator.phase
    phase = Phase.FORWARD if phase is Phase.RECOMPUTE else phase
    is_rms = model.normalization is Normalization.RMS_NORM
    if operator.kind is Kind.NORM and is_rms and base.has(Kind.RMS_NORM, phase):
        return (replace(operator, kind=Kind.RMS_NORM, phase=phase),)
    is_rotated = model.position_embedding is PositionEmbedding.ROPE
    if operator.kind is Kind.POSITION and is_rotated and base.has(Kind.ROTARY, phase):
        heads, micro = model.num_attention_heads, config.batch.micro_batch_size
        shape = (model.seq_length, micro, heads // config.parallelism.tp, model.kv_channels)
        return (replace(operator, kind=Kind.ROTARY, phase=phase, shape=shape),)
    if operator.kind is Kind.CORE_ATTENTION and config.is_attention_fused:
        if not base.has(Kind.FLASH_ATTENTION, phase):
            return (operator,)
        shape = (*operator.shape, operator.shape[-1])
        return (replace(operator, kind=Kind.FLASH_ATTENTION, phase=phase, shape=shape),)
    is_apart = not (config.is_attention_fused or config.is_softmax_fused)
    if operator.kind is Kind.CORE_ATTENTION and is_apart and base.has(Kind.MASK, phase):
        return _unfused(replace(operator, phase=phase))
    return (operator,)


def _unfused(operator: Operator) -> tuple[Operator, ...]:
    """Two batched products, and mask and softmax between them."""
    micro, heads, _, seq, channels = operator.shape
    matrices = micro * heads
    parts = (
        (Kind.BATCHED_PRODUCT, (matrices, seq, channels, seq)),
        (Kind.MASK, (matrices * seq, seq)),
        (Kind.SOFTMAX, (matrices * seq, seq)),
        (Kind.BATCHED_PRODUCT, (matrices, seq, seq, channels)),
    )
    return tuple(replace(operator, kind=kind, shape=shape) for kind, shape in parts)
