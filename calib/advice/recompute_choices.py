"""What Megatron can compute again in the backward phase of one layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from ..workload.config import Fp8Recipe, Recompute, RunConfig

_WITHIN_MOE = {"moe_act", "shared_experts"}
"""Modules that lie within ``moe``."""


def recomputed(config: RunConfig) -> Iterator[RunConfig]:
    """The layout with everything that Megatron can compute again: nothing, modules, layers.

    >>> from ..workload.config import Batch, ModelShape, Parallelism
    >>> gpt = ModelShape(num_layers=3, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> run = RunConfig(model=gpt, parallelism=Parallelism(),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8))
    >>> [(one.recompute.value, one.recompute_num_layers) for one in recomputed(run)][-3:]
    [('full', 1), ('full', 2), ('full', 0)]
    """
    plain = replace(
        config,
        recompute=Recompute.NONE,
        recompute_modules=(),
        recompute_num_layers=0,
        distributes_saved_activations=False,
    )
    yield plain
    for modules in _sets(_modules(config)):
        named = () if modules == ("core_attn",) else modules
        yield replace(plain, recompute=Recompute.SELECTIVE, recompute_modules=named)
    whole = replace(
        plain,
        recompute=Recompute.FULL,
        distributes_saved_activations=config.distributes_saved_activations,
    )
    for number in range(1, min(config.chunk_layers)):
        yield replace(whole, recompute_num_layers=number)
    yield whole


def recompute_text(config: RunConfig) -> str:
    """What a layout computes again, in words.

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
        return f"{'+'.join(config.recompute_modules or ('core_attn',))} again"
    number = config.recompute_num_layers
    return f"{number} layers of a chunk again" if number else "all layers again"


def _sets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for size in range(1, len(names) + 1):
        for chosen in combinations(names, size):
            if "moe" not in chosen or not _WITHIN_MOE & set(chosen):
                yield chosen


def _modules(config: RunConfig) -> tuple[str, ...]:
    """What ``--recompute-modules`` may name in this model, by the checks of Megatron-LM
    core_v0.16.1's ``TransformerConfig``."""
    model, experts = config.model, config.model.experts
    # Delayed scaling keeps one scale for both runs of a module.
    is_delayed = config.fp8 is Fp8Recipe.DELAYED
    has_dense = not all(model.has_experts(layer) for layer in range(model.num_layers))
    able = {
        "core_attn": True,
        "layernorm": not is_delayed,
        "mlp": has_dense,
        "mla_up_proj": model.latent_attention is not None,
        "moe": experts is not None,
        "moe_act": experts is not None and experts.is_grouped and not is_delayed,
        "shared_experts": experts is not None
        and bool(experts.shared_ffn_hidden_size)
        and not experts.overlaps_shared,
    }
    return tuple(name for name, is_able in able.items() if is_able)
