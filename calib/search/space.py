"""What may vary between the layouts of one model on so many ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

from ..arguments import NEEDS_ENGINE, TRANSFORMER_ENGINE, untaken
from ..errors import ConfigError
from ..layers import CORE_ATTENTION, WITHIN_MOE, BlockKind, RecomputeOption
from ..workload import (
    Batch,
    Collective,
    Engine,
    Fp8Recipe,
    GroupRole,
    Precision,
    Recompute,
    RunConfig,
    Schedule,
    Sharding,
    group_call,
    takes_options,
    uneven_layers,
)

MOST_CONTEXT = 16
"""Degrees of context parallelism that are tried: two nodes of 8."""
MOST_VIRTUAL = 8
"""Virtual stages: each adds messages, and Megatron's own runs use up to 8."""
_FIRST_LESS, _LAST_LESS = (0, 1, 2), (0, 1, 2, 3)
"""Layers that the first or the last stage may have less than the others, for embedding and head."""
WHOLE: dict[str, Any] = {
    "is_optimizer_distributed": False,
    "overlaps_param_gather": False,
    "sharding": Sharding.OPTIMIZER,
    "num_optimizer_instances": 1,
}
"""Fields of ``Parallelism`` where every replica has whole weights, gradients and states."""


FSDP_OPTIONS = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "--ckpt-format")
"""What a program must take for gradients or weights that are sharded."""
_SWITCHES = {
    "is_optimizer_distributed": "--use-distributed-optimizer",
    "overlaps_grad_reduce": "--overlap-grad-reduce",
    "overlaps_param_gather": "--overlap-param-gather",
}
"""Beside them, by field."""
OFFLOAD_OPTIONS = ("--optimizer-cpu-offload", "--optimizer-offload-fraction")
"""What a program must take for states with the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """How weights, gradients and optimizer are spread, and what of it overlaps."""

    changes: tuple[tuple[str, Any], ...]
    """Fields of ``Parallelism``."""
    offload_frac: float
    """Share of the optimizer's states in the host's memory."""

    def of(self, config: RunConfig) -> RunConfig:
        """The layout that they are ``states`` of, with these."""
        parallelism = replace(config.parallelism, **dict(self.changes))
        return replace(config, parallelism=parallelism, optimizer_offload_frac=self.offload_frac)


def shardings(config: RunConfig) -> tuple[Mapping[str, object], ...]:
    """Shardings of gradients or weights that the host of a run has without a pipeline.

    The first is none of them.  Megatron-FSDP wants an accelerator; loops of one's own have DDP,
    FSDP and FSDP in copies.
    """
    par = config.parallelism
    if par.engine is Engine.DEEPSPEED:
        return ({},)
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
    """Every way to keep the states of a layout, as its host can.

    The distributed optimizer off, on, and in so many instances; each with what may overlap (nothing
    does on a CPU) and with its states on the device or with the host.  One where nothing is
    replicated, where gradients or weights are sharded too, or where the loop is the user's own.
    What the program of the run takes no options for is not among them.
    """
    par = layout.parallelism
    unchanged = (States(changes=(), offload_frac=layout.optimizer_offload_frac),)
    is_deep = par.sharded in (Sharding.GRADS, Sharding.WEIGHTS)
    if par.dp * par.cp == 1 or is_deep or par.engine is not Engine.MEGATRON:
        return unchanged
    if not takes_options(layout):
        return unchanged
    # The precision-aware optimizer is the distributed optimizer's.
    is_plain = not layout.optimizer_state_nbytes
    choices = [(WHOLE, on) for on in _overlaps(layout, 1)] if is_plain else []
    for number in dict.fromkeys((1, num_instances)):
        if par.dp * par.cp % number or par.expert_dp % number:
            continue
        changes = {
            "is_optimizer_distributed": True,
            "sharding": Sharding.OPTIMIZER,
            "num_optimizer_instances": number,
        }
        choices += [(changes, on) for on in _overlaps(layout, 2)]
    every = tuple(
        States(changes=tuple({**changes, **on}.items()), offload_frac=frac)
        for changes, on in choices
        for frac in _offloads(layout, changes)
    )
    return every if not layout.absent else _taken(layout, every) or unchanged


def _taken(layout: RunConfig, every: Sequence[States]) -> tuple[States, ...]:
    """Those that the program of the run can be asked for."""
    return tuple(one for one in every if not untaken(one.of(layout), layout))


def _overlaps(layout: RunConfig, number: int) -> list[dict[str, bool]]:
    """Both, the reduction alone, none; Megatron gathers ahead only with the reduction beside."""
    par = layout.parallelism
    names = ("overlaps_grad_reduce", "overlaps_param_gather")
    if layout.device == "cpu":
        is_on = par.overlaps_grad_reduce, par.overlaps_param_gather or par.overlaps_grad_reduce
        return [dict(zip(names, (is_on[0], is_on[1] and number == 2), strict=True))]
    rows = [(True, True), (True, False), (False, False)][2 - number :]
    return [dict(zip(names, row, strict=True)) for row in rows]


def _offloads(layout: RunConfig, changes: dict[str, Any]) -> tuple[float, ...]:
    """Shares of the optimizer that the host may hold: as it is, none, all.

    Megatron's optimizer with states in the host's memory is a distributed one in mixed precision.
    """
    current_frac = layout.optimizer_offload_frac
    is_able = changes["is_optimizer_distributed"] and changes["num_optimizer_instances"] == 1
    if not is_able or layout.device == "cpu" or layout.precision is not Precision.BF16:
        return (0.0,)
    return tuple(dict.fromkeys((0.0, current_frac, 1.0)))


def other_shardings(layout: RunConfig) -> list[RunConfig]:
    """A layout under every other sharding and overlap that its host has.

    Loops of one's own: DDP, FSDP and FSDP in two copies.  Nothing where there is one replica.
    """
    par = layout.parallelism
    if par.dp * par.cp == 1:
        return []
    deep = shardings(layout) if par.pp == 1 else shardings(layout)[:1]
    layouts: dict[RunConfig, None] = {}
    for changes in deep:
        try:
            base = replace(layout, parallelism=replace(par, **dict[str, Any](changes)))
        except ConfigError:
            continue
        layouts |= dict.fromkeys(choice.of(base) for choice in states(base, num_nodes(base)))
    return [one for one in layouts if one != layout]


def num_nodes(layout: RunConfig) -> int:
    """Nodes that the replicas of a layout lie on."""
    whole = replace(layout, parallelism=replace(layout.parallelism, num_optimizer_instances=1))
    return group_call(whole, Collective.ALL_REDUCE, GroupRole.DP, 1).num_nodes


def splits(config: RunConfig, pp: int) -> list[tuple[int, ...]]:
    """Layers of the stages: even (), one last stage that differs, and ends with fewer layers.

    Embedding and head take the place of layers; ends that have up to three layers less are tried.

    >>> from ..workload import Batch, ModelShape, Parallelism
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
    if "--pipeline-model-parallel-layout" in config.absent:
        return [one for one in layer_splits if one in ((), par.chunk_layers)]
    return list(layer_splits)


def _fewer_at_ends(num_layers: int, pp: int) -> Iterator[tuple[int, ...]]:
    for first in _FIRST_LESS:
        for last in _LAST_LESS:
            each, rest = divmod(num_layers + first + last, pp)
            is_even = first == last and pp == 2
            if rest or each <= max(first, last) or not first + last or is_even:
                continue
            yield (each - first, *[each] * (pp - 2), each - last)


def with_degrees(config: RunConfig, batch: Batch, changes: Mapping[str, object]) -> RunConfig:
    """The layout of a cell: degrees, split and micro-batch, nothing computed again.

    Raises ``ConfigError`` where it cannot run.
    """
    par = config.parallelism
    fields: dict[str, Any] = dict(changes)
    parallelism = replace(
        par,
        microbatch_group_size=0,
        schedule=par.schedule if fields["vp"] == 1 else Schedule.ONE_F_ONE_B,
        overlaps_tp=par.overlaps_tp and fields["is_sequence_parallel"],
        **fields,
    )
    return replace(
        config,
        parallelism=parallelism,
        batch=batch,
        recompute=Recompute.NONE,
        recompute_modules=(),
        recompute_num_layers=0,
    )


def block_kinds(config: RunConfig) -> tuple[BlockKind, ...]:
    """Kinds of blocks that layouts of this model consist of."""
    model = config.model
    has_dense = not all(model.has_experts(layer) for layer in range(model.num_layers))
    kinds = [BlockKind.EMBEDDING]
    kinds += [BlockKind.LAYER] if has_dense else []
    kinds += [BlockKind.EXPERT_LAYER] if model.experts is not None else []
    if model.num_prediction_layers:
        kinds += [BlockKind.EMBEDDING_COPY, BlockKind.PREDICTION]
    return (*kinds, BlockKind.HEAD)


_FULL = ("--recompute-method", "--recompute-num-layers")


def lightest(recompute_options: Iterable[RecomputeOption]) -> list[RecomputeOption]:
    """Those that no other one is within.

    >>> names = (("moe",), ("moe_act", "shared_experts"), ("mlp",), ("mlp", "moe_act"))
    >>> selective = [RecomputeOption(recompute=Recompute.SELECTIVE, modules=one) for one in names]
    >>> [one.modules for one in lightest(selective)]
    [('mlp',), ('moe_act', 'shared_experts')]
    """
    result: list[RecomputeOption] = []
    for recompute in sorted(recompute_options, key=lambda one: one.weight):
        if not any(one.is_within(recompute) for one in result):
            result.append(recompute)
    return result


def recomputes(config: RunConfig) -> tuple[RecomputeOption, ...]:
    """Everything that the host of a run can compute again, nothing first, then sets of modules by
    their number, then layers.

    Of two sets that compute the same, one is left out (``moe`` has ``moe_act`` in it).  What the
    program of the run takes no options for, or lacks a library for, is not among them.

    >>> from ..workload import Batch, ModelShape, Parallelism
    >>> gpt = ModelShape(num_layers=3, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> run = RunConfig(model=gpt, parallelism=Parallelism(),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8))
    >>> [(one.recompute.value, one.num_layers) for one in recomputes(run)][-3:]
    [('full', 1), ('full', 2), ('full', 0)]
    """
    if not takes_options(config):
        # Gradient checkpointing of these is that of whole layers.
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
