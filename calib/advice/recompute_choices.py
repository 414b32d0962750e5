"""What a layout computes again, in words."""

from __future__ import annotations

from ..layers.again import Again
from ..workload.config import Recompute, RunConfig


def recompute_text(config: RunConfig) -> str:
    """What a layout computes again, in words.

    >>> from dataclasses import replace
    >>> from ..workload.config import Batch, ModelShape, Parallelism
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> run = RunConfig(model=gpt, parallelism=Parallelism(), recompute=Recompute.SELECTIVE,
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8))
    >>> recompute_text(run), recompute_text(replace(run, recompute=Recompute.NONE))
    ('core_attn again', 'no recompute')
    """
    if config.recompute is Recompute.NONE:
        return "no recompute"
    if config.recompute is Recompute.SELECTIVE:
        return f"{'+'.join(Again.own(config).names)} again"
    number = config.recompute_num_layers
    return f"{number} layers of a chunk again" if number else "all layers again"
