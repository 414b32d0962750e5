"""What may vary between the layouts of one model on so many ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from ..errors import ConfigError
from ..layers.blocks import BlockKind
from ..workload.config import Engine, Precision, Recompute, RunConfig, Schedule, Sharding
from ..workload.pipeline_layout import uneven_layers
from .hosts import takes_options

MOST_CONTEXT = 16
"""Degrees of context parallelism that are tried: two nodes of 8."""
MOST_VIRTUAL = 8
"""Virtual stages: each adds messages, and Megatron's own runs use up to 8."""
_FIRST_LESS, _LAST_LESS = (0, 1, 2), (0, 1, 2, 3)
"""Layers that the first or the last stage may have less than the others, for embedding and head."""
_WHOLE: dict[str, Any] = {
    "is_optimizer_distributed": False,
    "overlaps_param_gather": False,
    "sharding": Sharding.OPTIMIZER,
    "num_optimizer_instances": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """What is computed again in the backward phase."""

    recompute: Recompute = Recompute.NONE
    modules: tuple[str, ...] = ()
    num_layers: int = 0
    """Of each chunk under ``FULL``; 0 means all."""

    def is_within(self, other: Again) -> bool:
        """True where all that runs again here does so under the other as well."""
        if self.recompute is not other.recompute:
            return False
        if self.recompute is Recompute.FULL:
            return bool(self.num_layers) and self.num_layers <= (other.num_layers or 10**6)
        parts = set(other.modules or ("core_attn",))
        parts |= _WITHIN_MOE if "moe" in parts else set()
        return set(self.modules or ("core_attn",)) <= parts

    def of(self, config: RunConfig) -> RunConfig:
        """The layout with this."""
        return replace(
            config,
            recompute=self.recompute,
            recompute_modules=self.modules,
            recompute_num_layers=self.num_layers,
        )


_WITHIN_MOE = {"moe_act", "shared_experts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """How weights, gradients and optimizer are spread, and what of it overlaps."""

    changes: tuple[tuple[str, Any], ...]
    """Fields of ``Parallelism``."""
    offload_frac: float
    """Share of the optimizer's states in the host's memory."""

    def of(self, config: RunConfig) -> RunConfig:
        """The layout with these; ``ConfigError`` where it cannot have them."""
        parallelism = replace(config.parallelism, **dict(self.changes))
        return replace(config, parallelism=parallelism, optimizer_offload_frac=self.offload_frac)


def recomputes(config: RunConfig, most_layers: int) -> tuple[Again, ...]:
    """Everything that Megatron can compute again, lightest first: nothing, modules, layers.

    ``most_layers`` is the number of layers of the smallest chunk.  Sets of modules of which one
    holds another's are left out (``moe`` has ``moe_act`` and ``shared_experts``).
    """
    found = [Again()]
    names = _modules(config)
    for size in range(1, len(names) + 1):
        for chosen in combinations(names, size):
            if "moe" in chosen and _WITHIN_MOE & set(chosen):
                continue
            modules = () if chosen == ("core_attn",) else chosen
            found.append(Again(recompute=Recompute.SELECTIVE, modules=modules))
    if takes_options(config):
        found += [
            Again(recompute=Recompute.FULL, num_layers=number) for number in range(1, most_layers)
        ]
    return (*found, Again(recompute=Recompute.FULL))


def _modules(config: RunConfig) -> tuple[str, ...]:
    """What ``--recompute-modules`` may name in this model."""
    model = config.model
    if not takes_options(config):
        return ("core_attn",)
    found = ["core_attn", "layernorm"]
    has_dense = not all(model.has_experts(layer) for layer in range(model.num_layers))
    found += ["mlp"] if has_dense else []
    if model.experts is not None:
        found += ["moe", "moe_act"]
        found += ["shared_experts"] if model.experts.shared_ffn_hidden_size else []
    return (*found, "mla_up_proj") if model.latent_attention is not None else tuple(found)


def shardings(config: RunConfig) -> tuple[dict[str, Any], ...]:
    """Shardings of gradients or weights that the host of a run has without a pipeline.

    The first is none of them.  Megatron-FSDP wants an accelerator; loops of one's own have DDP,
    FSDP and FSDP in copies.
    """
    if config.parallelism.engine is not Engine.MEGATRON:
        return ({},)
    plain = {"sharding": Sharding.OPTIMIZER, "num_optimizer_instances": 1}
    deep = {"is_optimizer_distributed": True, "num_optimizer_instances": 1}
    beside = {"overlaps_grad_reduce": True, "overlaps_param_gather": True}
    if not takes_options(config):
        whole = {**deep, **beside, "sharding": Sharding.WEIGHTS}
        return (_WHOLE, whole, {**whole, "num_optimizer_instances": 2})
    if config.device == "cpu":
        return (plain,)
    return (
        plain,
        {**deep, **beside, "sharding": Sharding.GRADS},
        {**deep, **beside, "sharding": Sharding.WEIGHTS},
    )


def states(layout: RunConfig, num_nodes: int) -> tuple[States, ...]:
    """Every way to keep the states of a layout, as its host can.

    The distributed optimizer off, on, and in one instance for each node; each with what may overlap
    (nothing does on a CPU) and with its states on the device or with the host.  One where nothing
    is replicated, where gradients or weights are sharded too, or where the loop is the user's own.
    """
    par = layout.parallelism
    own = (States(changes=(), offload_frac=layout.optimizer_offload_frac),)
    is_deep = par.sharded in (Sharding.GRADS, Sharding.WEIGHTS)
    if par.dp * par.cp == 1 or is_deep or par.engine is not Engine.MEGATRON:
        return own
    if not takes_options(layout):
        return own
    found = [] if _wants_distributed(layout) else [(_WHOLE, on) for on in _overlaps(layout, 1)]
    for number in dict.fromkeys((1, num_nodes)):
        changes = {
            "is_optimizer_distributed": True,
            "sharding": Sharding.OPTIMIZER,
            "num_optimizer_instances": number,
        }
        found += [(changes, on) for on in _overlaps(layout, 2)]
    return tuple(
        States(changes=tuple({**changes, **on}.items()), offload_frac=frac)
        for changes, on in found
        for frac in _offloads(layout, changes)
    )


def _wants_distributed(layout: RunConfig) -> bool:
    """The precision-aware optimizer is the distributed optimizer's."""
    return bool(layout.optimizer_state_nbytes)


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
    own = layout.optimizer_offload_frac
    is_able = changes["is_optimizer_distributed"] and changes["num_optimizer_instances"] == 1
    if not is_able or layout.device == "cpu" or layout.precision is not Precision.BF16:
        return (0.0,)
    return tuple(dict.fromkeys((0.0, own, 1.0)))


def splits(config: RunConfig, pp: int) -> list[tuple[int, ...]]:
    """Layers of the stages: even (), one last stage that differs, and ends with fewer layers.

    Embedding and head take the place of layers; ends that have up to three layers less are tried.

    >>> from ..workload.config import Batch, ModelShape, Parallelism
    >>> gpt = ModelShape(num_layers=10, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> run = RunConfig(model=gpt, parallelism=Parallelism(),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8))
    >>> splits(run, 4)
    [(3, 3, 3, 1), (2, 3, 3, 2), (1, 3, 3, 3), (2, 4, 4, 0)]
    """
    num_layers = config.model.num_layers
    if pp == 1:
        return [()]
    found = dict.fromkeys([uneven_layers(num_layers, pp)])
    own = config.parallelism
    if own.pp == pp and own.vp == 1 and own.chunk_layers:
        found.setdefault(own.chunk_layers)
    if takes_options(config):
        found |= dict.fromkeys(_fewer_at_ends(num_layers, pp))
    return list(found)


def _fewer_at_ends(num_layers: int, pp: int) -> Iterator[tuple[int, ...]]:
    for first in _FIRST_LESS:
        for last in _LAST_LESS:
            each, rest = divmod(num_layers + first + last, pp)
            if rest or each <= max(first, last) or not first + last:
                continue
            yield (each - first, *[each] * (pp - 2), each - last)


def with_degrees(config: RunConfig, batch: Any, *, changes: dict[str, Any]) -> RunConfig:
    """The layout of a cell: degrees, split and micro-batch, nothing computed again.

    Raises ``ConfigError`` where it cannot run.
    """
    own = config.parallelism
    vp = changes["vp"]
    parallelism = replace(
        own,
        microbatch_group_size=0,
        schedule=own.schedule if vp == 1 else Schedule.ONE_F_ONE_B,
        overlaps_tp=own.overlaps_tp and changes["is_sequence_parallel"],
        **changes,
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
    found = [BlockKind.EMBEDDING]
    found += [BlockKind.LAYER] if has_dense else []
    found += [BlockKind.EXPERT_LAYER] if model.experts is not None else []
    if model.num_prediction_layers:
        found += [BlockKind.EMBEDDING_COPY, BlockKind.PREDICTION]
    return (*found, BlockKind.HEAD)


def checked_ranks(num_ranks: int) -> int:
    """The number; ``ConfigError`` where it is none."""
    if num_ranks < 1:
        raise ConfigError(f"{num_ranks} ranks are none; give at least 1")
    return num_ranks
