"""A layout in words, for who does not know its label; and what it computes again."""

from __future__ import annotations

from ..layers.again import Again
from ..search.labels import GRAD_OVERLAP, NO_OVERLAP, NO_P2P, layout_label
from ..workload.config import Recompute, RunConfig, Schedule

_SPELLED = {
    "SP": "sequence parallel",
    "noSP": "no sequence parallelism",
    NO_OVERLAP: "transfers of the replicas beside nothing",
    GRAD_OVERLAP: "of the replicas' transfers gradients alone beside the passes",
    NO_P2P: "messages between stages beside nothing",
    Schedule.ZERO_BUBBLE_H1.value: "zero bubble H1",
    Schedule.ZERO_BUBBLE_H2.value: "zero bubble H2",
}


def layout_words(config: RunConfig) -> str:
    """A layout in the field's words: its degrees and sharding, then what else its label says.

    >>> from dataclasses import replace
    >>> from ..workload.config import Batch, ModelShape, Parallelism
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> run = RunConfig(model=gpt, parallelism=Parallelism(pp=2, dp=2),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8))
    >>> layout_words(run)
    'PP2 DP2, micro-batch 1'
    >>> layout_words(replace(run, parallelism=Parallelism(), recompute=Recompute.FULL))
    'no parallelism, micro-batch 1, all layers computed again'
    """
    micro_batch = f"mbs{config.batch.micro_batch_size}"
    words = layout_label(config).split()
    degrees, others = [], []
    for word in words[: words.index(micro_batch)]:
        if word[0].isdecimal():
            others.append(f"layers {word}")
        elif word in _SPELLED:
            others.append(_SPELLED[word])
        else:
            degrees.append(word)
    others.append(f"micro-batch {config.batch.micro_batch_size}")
    if config.recompute is not Recompute.NONE:
        others.append(recompute_text(config).replace("again", "computed again"))
    if config.optimizer_offload_frac:
        share = f"{100 * config.optimizer_offload_frac:.0f} %"
        others.append(f"{share} of the optimizer in the host's memory")
    return ", ".join((" ".join(degrees) or "no parallelism", *others))


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
