"""What Megatron can compute again in the backward phase of one layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations

from ..arguments.taken_options import NEEDS_ENGINE, TRANSFORMER_ENGINE
from ..layers.again import CORE_ATTENTION, WITHIN_MOE, Again
from ..workload.config import Fp8Recipe, Recompute, RunConfig, takes_options

_FULL = ("--recompute-method", "--recompute-num-layers")


def lightest(agains: Iterable[Again]) -> list[Again]:
    """Those that no other one is within.

    >>> names = (("moe",), ("moe_act", "shared_experts"), ("mlp",), ("mlp", "moe_act"))
    >>> selective = [Again(recompute=Recompute.SELECTIVE, modules=one) for one in names]
    >>> [one.modules for one in lightest(selective)]
    [('mlp',), ('moe_act', 'shared_experts')]
    """
    found: list[Again] = []
    for again in sorted(agains, key=lambda one: one.weight):
        if not any(one.is_within(again) for one in found):
            found.append(again)
    return found


def recomputes(config: RunConfig) -> tuple[Again, ...]:
    """Everything that the host of a run can compute again, nothing first, then sets of modules by
    their number, then layers.

    Of two sets that compute the same, one is left out (``moe`` has ``moe_act`` in it).  What the
    program of the run takes no options for, or lacks a library for, is not among them.

    >>> from ..workload.config import Batch, ModelShape, Parallelism
    >>> gpt = ModelShape(num_layers=3, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> run = RunConfig(model=gpt, parallelism=Parallelism(),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8))
    >>> [(one.recompute.value, one.num_layers) for one in recomputes(run)][-3:]
    [('full', 1), ('full', 2), ('full', 0)]
    """
    if not takes_options(config):
        # Gradient checkpointing of these is that of whole layers.
        known = (Again(), Again.own(config), Again(recompute=Recompute.FULL))
        return tuple(dict.fromkeys(known))
    has_whole = not any(option in config.absent for option in _FULL)
    return _all(modules_of(config), min(config.chunk_layers) if has_whole else None)


# Thousands of layouts share few of these.
@cache
def _all(modules: tuple[str, ...], num_layers: int | None) -> tuple[Again, ...]:
    found = [Again()]
    for chosen in _sets(modules):
        named = () if chosen == CORE_ATTENTION else chosen
        found.append(Again(recompute=Recompute.SELECTIVE, modules=named))
    numbers = () if num_layers is None else (*range(1, num_layers), 0)
    return (*found, *(Again(recompute=Recompute.FULL, num_layers=one) for one in numbers))


def _sets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for size in range(1, len(names) + 1):
        for chosen in combinations(names, size):
            if "moe" not in chosen or not WITHIN_MOE & set(chosen):
                yield chosen


def modules_of(config: RunConfig) -> tuple[str, ...]:
    """What ``--recompute-modules`` may name in this model, by the checks of Megatron-LM
    core_v0.16.1's ``TransformerConfig``; ``core_attn`` alone where the program takes no such
    option."""
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
    if "--recompute-modules" in config.absent:
        return CORE_ATTENTION
    lost = NEEDS_ENGINE if TRANSFORMER_ENGINE in config.absent else frozenset[str]()
    return tuple(name for name, is_able in able.items() if is_able and name not in lost)
