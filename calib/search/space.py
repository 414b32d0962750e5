"""The choices that vary between layouts of one model on a given number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

from ..arguments.taken_options import NEEDS_ENGINE, TRANSFORMER_ENGINE, unsupported_options_reason
from ..layers.recompute import CORE_ATTENTION, WITHIN_MOE, RecomputeOption
from ..workload.choices import WHOLE
from ..workload.collectives import Collective, GroupRole
from ..workload.config import Fp8Recipe, Precision, Recompute, RunConfig, takes_options
from ..workload.parallelism import Engine, Sharding
from ..workload.pipeline_layout import uneven_layers
from ..workload.ranks import group_call

MOST_CONTEXT = 16
"""Largest degree of context parallelism that is tried: two nodes of 8 GPUs."""
MOST_VIRTUAL = 8
"""Most virtual stages; each adds messages, and Megatron's published runs use up to 8."""
_FIRST_LESS, _LAST_LESS = (0, 1, 2), (0, 1, 2, 3)
"""Numbers of layers by which the first or last stage may be shorter, for embedding and head."""
_DISTRIBUTED: dict[str, Any] = {
    "is_optimizer_distributed": True,
    "sharding": Sharding.OPTIMIZER,
    "num_optimizer_instances": 1,
}
"""Fields of ``Parallelism`` if replicas share the states."""


FSDP_OPTIONS = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "--ckpt-format")
"""Options that a program needs for sharded gradients or weights."""
_SWITCHES = {
    "is_optimizer_distributed": "--use-distributed-optimizer",
    "overlaps_grad_reduce": "--overlap-grad-reduce",
    "overlaps_param_gather": "--overlap-param-gather",
}
"""Options that it needs in addition, by field."""
OFFLOAD_OPTIONS = ("--optimizer-cpu-offload", "--optimizer-offload-fraction")
"""Options that a program needs to offload optimizer states to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Sharding of weights, gradients and optimizer, and its overlap."""

    changes: tuple[tuple[str, Any], ...]
    """Values of fields of ``Parallelism``."""
    offload_frac: float
    """Share of the optimizer's states in the host's memory."""

    def of(self, config: RunConfig) -> RunConfig:
        """Return a layout with these states."""
        parallelism = replace(config.parallelism, **dict(self.changes))
        return replace(config, parallelism=parallelism, optimizer_offload_frac=self.offload_frac)


def shardings(config: RunConfig) -> tuple[Mapping[str, object], ...]:
    """Return shardings of gradients or weights that a program supports without a pipeline.

    The first shards neither.  Megatron-FSDP needs an accelerator; custom loops have DDP, FSDP and
    FSDP in copies.
    """
    par = config.parallelism
    plain = {"sharding": Sharding.OPTIMIZER, "num_optimizer_instances": 1}
    deep = {"is_optimizer_distributed": True, "num_optimizer_instances": 1}
    overlaps = {"overlaps_grad_reduce": True, "overlaps_param_gather": True}
    if not takes_options(config):
        whole = {**deep, **overlaps, "sharding": Sharding.WEIGHTS}
        return (WHOLE, whole, {**whole, "num_optimizer_instances": 2})
    needed = (*FSDP_OPTIONS, *(_SWITCHES[name] for name in _SWITCHES if not getattr(par, name)))
    if config.device == "cpu" or any(option in config.absent for option in needed):
        return (plain,)
    return (
        plain,
        {**deep, **overlaps, "sharding": Sharding.GRADS},
        {**deep, **overlaps, "sharding": Sharding.WEIGHTS},
    )


def states(layout: RunConfig, num_instances: int) -> tuple[States, ...]:
    """Return the states of a layout that its program supports.

    The distributed optimizer is off, on, or in ``num_instances`` instances, each with every overlap
    (none on a CPU) and with its states on the device or on the host.  If nothing is replicated,
    only their place is a choice.  The only choice is the current one if gradients or weights are
    sharded, or for custom loops.  Choices that the program has no options for are excluded.
    """
    par = layout.parallelism
    unchanged = (States(changes=(), offload_frac=layout.optimizer_offload_frac),)
    is_deep = par.sharded in (Sharding.GRADS, Sharding.WEIGHTS)
    if is_deep or par.engine is not Engine.MEGATRON or not takes_options(layout):
        return unchanged
    if par.dp * par.cp == 1:
        fracs = _offloads(layout, _DISTRIBUTED)[1:]
        hosted = [States(changes=tuple(_DISTRIBUTED.items()), offload_frac=frac) for frac in fracs]
        return (*unchanged, *(_taken(layout, hosted) if layout.absent else hosted))
    # The precision-aware optimizer requires the distributed optimizer.
    is_plain = not layout.optimizer_state_nbytes
    choices = [(WHOLE, on) for on in _overlaps(layout, 1)] if is_plain else []
    for number in dict.fromkeys((1, num_instances)):
        if par.dp * par.cp % number or par.expert_dp % number:
            continue
        changes = {**_DISTRIBUTED, "num_optimizer_instances": number}
        choices += [(changes, on) for on in _overlaps(layout, 2)]
    every = tuple(
        States(changes=tuple({**changes, **on}.items()), offload_frac=frac)
        for changes, on in choices
        for frac in _offloads(layout, changes)
    )
    return every if not layout.absent else _taken(layout, every) or unchanged


def _taken(layout: RunConfig, every: Sequence[States]) -> tuple[States, ...]:
    """Return the states that the program of the run has options for."""
    return tuple(one for one in every if not unsupported_options_reason(one.of(layout), layout))


def _overlaps(layout: RunConfig, number: int) -> list[dict[str, bool]]:
    """Return overlaps: both, reduction, none; Megatron overlaps gathers only with the reduction."""
    par = layout.parallelism
    names = ("overlaps_grad_reduce", "overlaps_param_gather")
    if layout.device == "cpu":
        is_on = par.overlaps_grad_reduce, par.overlaps_param_gather or par.overlaps_grad_reduce
        return [dict(zip(names, (is_on[0], is_on[1] and number == 2), strict=True))]
    rows = [(True, True), (True, False), (False, False)][2 - number :]
    return [dict(zip(names, row, strict=True)) for row in rows]


def _offloads(layout: RunConfig, changes: dict[str, Any]) -> tuple[float, ...]:
    """Return shares of the optimizer that may be offloaded to the host: none, as it is, all.

    Megatron offloads only the distributed optimizer in mixed precision.
    """
    current_frac = layout.optimizer_offload_frac
    is_able = changes["is_optimizer_distributed"] and changes["num_optimizer_instances"] == 1
    if not is_able or layout.device == "cpu" or layout.precision is not Precision.BF16:
        return (0.0,)
    return tuple(dict.fromkeys((0.0, current_frac, 1.0)))


def num_nodes(layout: RunConfig) -> int:
    """Return the number of nodes that the replicas of a layout span."""
    whole = replace(layout, parallelism=replace(layout.parallelism, num_optimizer_instances=1))
    return group_call(whole, Collective.ALL_REDUCE, GroupRole.DP, 1).num_nodes


def splits(config: RunConfig, pp: int) -> list[tuple[int, ...]]:
    """Return layers of the stages: even (), a last stage that differs, and shorter end stages.

    Embedding and head take the place of layers; end stages with up to three layers less are tried.

    >>> from ..workload.config import Batch
    >>> from ..workload.model_shape import ModelShape
    >>> from ..workload.parallelism import Parallelism
    >>> gpt = ModelShape(num_layers=10, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> run = RunConfig(model=gpt, parallelism=Parallelism(),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8))
    >>> splits(run, 4)
    [(3, 3, 3, 1), (2, 3, 3, 2), (1, 3, 3, 3)]
    """
    num_layers = config.model.num_layers
    if pp == 1:
        return [()]
    layer_splits = dict.fromkeys([uneven_layers(num_layers, pp)])
    par = config.parallelism
    if par.pp == pp and par.vp == 1 and par.chunk_layers:
        layer_splits.setdefault(par.chunk_layers)
    if takes_options(config):
        layer_splits |= dict.fromkeys(_fewer_at_ends(num_layers, pp))
    if not has_segments(config):
        return [one for one in layer_splits if one in ((), par.chunk_layers)]
    return list(layer_splits)


def has_segments(config: RunConfig) -> bool:
    """Return True if the program of a run takes any split of layers into chunks."""
    is_hybrid = bool(config.model.layer_kinds)
    option = "--hybrid-layer-pattern" if is_hybrid else "--pipeline-model-parallel-layout"
    return option not in config.absent


def _fewer_at_ends(num_layers: int, pp: int) -> Iterator[tuple[int, ...]]:
    for first in _FIRST_LESS:
        for last in _LAST_LESS:
            each, rest = divmod(num_layers + first + last, pp)
            is_even = first == last and pp == 2
            if rest or each <= max(first, last) or not first + last or is_even:
                continue
            yield (each - first, *[each] * (pp - 2), each - last)


def plain_layout(config: RunConfig, sharding: Mapping[str, object]) -> RunConfig:
    """Return the running layout with what no cell has: recompute, and groups of micro-batches."""
    changes: dict[str, Any] = {**sharding, "microbatch_group_size": 0}
    return replace(
        config,
        parallelism=replace(config.parallelism, **changes),
        recompute=Recompute.NONE,
        recompute_modules=(),
        recompute_num_layers=0,
        recompute_span=1,
    )


_FULL = ("--recompute-method", "--recompute-num-layers")


def recomputes(config: RunConfig) -> tuple[RecomputeOption, ...]:
    """Return the recompute options of a run: none, then sets of modules by size, then layers.

    Of equivalent sets only one is included (``moe`` contains ``moe_act``).  Choices for which the
    program of the run has no option or no library are excluded.

    >>> from ..workload.config import Batch
    >>> from ..workload.model_shape import ModelShape
    >>> from ..workload.parallelism import Parallelism
    >>> gpt = ModelShape(num_layers=3, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> run = RunConfig(model=gpt, parallelism=Parallelism(),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8))
    >>> [(one.recompute.value, one.num_layers) for one in recomputes(run)][-3:]
    [('full', 1), ('full', 2), ('full', 0)]
    """
    if not takes_options(config):
        # Gradient checkpointing in custom loops is of whole layers.
        known = (
            RecomputeOption(),
            RecomputeOption.from_config(config),
            RecomputeOption(recompute=Recompute.FULL),
        )
        return tuple(dict.fromkeys(known))
    has_whole = not any(option in config.absent for option in _FULL)
    return _all(modules_of(config), min(config.chunk_layers) if has_whole else None)


# Thousands of layouts share few of these.
@cache
def _all(modules: tuple[str, ...], num_layers: int | None) -> tuple[RecomputeOption, ...]:
    options = [RecomputeOption()]
    for chosen in _sets(modules):
        named = () if chosen == CORE_ATTENTION else chosen
        options.append(RecomputeOption(recompute=Recompute.SELECTIVE, modules=named))
    numbers = () if num_layers is None else (*range(1, num_layers), 0)
    return (
        *options,
        *(RecomputeOption(recompute=Recompute.FULL, num_layers=one) for one in numbers),
    )


def _sets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for size in range(1, len(names) + 1):
        for chosen in combinations(names, size):
            if "moe" not in chosen or not WITHIN_MOE & set(chosen):
                yield chosen


def modules_of(config: RunConfig) -> tuple[str, ...]:
    """Return valid names for ``--recompute-modules``; only ``core_attn`` without such an option.

    By the checks in ``TransformerConfig`` of Megatron-LM core_v0.16.1.
    """
    model, experts = config.model, config.model.experts
    # Delayed scaling has one scale for both runs of a module.
    is_delayed = config.fp8 is Fp8Recipe.DELAYED
    able = {
        "core_attn": True,
        "layernorm": not is_delayed,
        "mlp": model.has_dense_mlp,
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
