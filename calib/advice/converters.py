"""Which layouts a checkpoint can be loaded into as it is."""

from __future__ import annotations

from ..workload.config import RunConfig, Sharding, takes_options

_FORMS = {
    Sharding.NONE: "a whole optimizer",
    Sharding.OPTIMIZER: "the distributed optimizer",
    Sharding.GRADS: "Megatron-FSDP",
    Sharding.WEIGHTS: "Megatron-FSDP",
}
"""Of which each saves its states in a form of its own."""


def converter(config: RunConfig, running: RunConfig) -> str:
    """Why a run cannot go on under another sharding; empty where it can.

    Megatron's optimizers save their states in forms of their own, which only a converter joins
    (Megatron-LM issue 851); FSDP wants ``--ckpt-format fsdp_dtensor``.

    >>> from dataclasses import replace
    >>> from ..workload.config import Batch, ModelShape, Parallelism
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> here = RunConfig(model=gpt, parallelism=Parallelism(dp=2),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8))
    >>> there = replace(here, parallelism=Parallelism(dp=2, is_optimizer_distributed=True))
    >>> converter(there, here)
    'its checkpoint (the distributed optimizer) would need a converter'
    """
    if not takes_options(running):
        return ""
    form = _FORMS[config.parallelism.sharded]
    is_same = form == _FORMS[running.parallelism.sharded]
    return "" if is_same else f"its checkpoint ({form}) would need a converter"
