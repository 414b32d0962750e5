"""The same layout with weights, gradients and optimizer sharded otherwise, as the host can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from ..workload.collectives import Collective, GroupRole
from ..workload.config import Engine, RunConfig, Sharding
from ..workload.ranks import group_call

_BATCH_ALONE = ("transformers", "Lightning", "PyTorch", "torchtitan")
"""Hosts whose degrees are the user's own code; a command line changes their batch alone."""
_PLAIN: dict[str, Any] = {
    "is_optimizer_distributed": False,
    "overlaps_param_gather": False,
    "sharding": Sharding.OPTIMIZER,
    "num_optimizer_instances": 1,
}
_FORMS = {
    Sharding.NONE: "a whole optimizer",
    Sharding.OPTIMIZER: "the distributed optimizer",
    Sharding.GRADS: "Megatron-FSDP",
    Sharding.WEIGHTS: "Megatron-FSDP",
}
"""Of which each saves its states in a form of its own."""


def takes_options(running: RunConfig) -> bool:
    """False where the host of a run is not asked for layouts by Megatron's options."""
    return not running.framework.startswith(_BATCH_ALONE)


def sharded_otherwise(layouts: Sequence[RunConfig]) -> list[RunConfig]:
    """Each of the layouts under every other sharding that its host has, none twice.

    Megatron: the distributed optimizer, off, on, and in one instance for each node, and FSDP of
    gradients and of weights too (ZeRO-2 and 3) where no pipeline is in the way.  Loops of one's
    own: DDP, FSDP and FSDP in copies, one for each node, or two.  Nothing where there is one
    replica.
    """
    known = set(layouts)
    found = dict.fromkeys(other for layout in layouts for other in _others(layout))
    return [other for other in found if other not in known]


def converter(config: RunConfig, running: RunConfig) -> str:
    """Why a run cannot go on under another sharding; empty where it can.

    Megatron's optimizers save their states in forms of their own, which only a converter joins
    (Megatron-LM issue 851); FSDP wants ``--ckpt-format fsdp_dtensor``.

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


def _others(config: RunConfig) -> Iterator[RunConfig]:
    par = config.parallelism
    if par.dp * par.cp < 2 or par.engine is not Engine.MEGATRON:
        return
    choices = _of_megatron(config) if takes_options(config) else _of_loops(config)
    for changes in choices:
        try:
            yield replace(config, parallelism=replace(par, **changes))
        except ConfigError:
            continue


def _of_megatron(config: RunConfig) -> Iterator[dict[str, Any]]:
    par = config.parallelism
    # The precision-aware optimizer and offload are the distributed optimizer's.
    if not (config.optimizer_state_nbytes or config.optimizer_offload_frac):
        yield _PLAIN
    on = {
        "is_optimizer_distributed": True,
        "overlaps_param_gather": par.overlaps_param_gather
        or (par.overlaps_grad_reduce and not par.is_optimizer_distributed),
    }
    for number in dict.fromkeys((1, _num_nodes(config))):
        yield {**on, "sharding": Sharding.OPTIMIZER, "num_optimizer_instances": number}
    if par.pp == 1 and config.device != "cpu":
        for sharding in (Sharding.GRADS, Sharding.WEIGHTS):
            yield {**on, "sharding": sharding, "num_optimizer_instances": 1}


def _of_loops(config: RunConfig) -> Iterator[dict[str, Any]]:
    yield _PLAIN
    nodes = _num_nodes(config)
    for number in (1, nodes if nodes > 1 else 2):
        yield {
            "is_optimizer_distributed": True,
            "sharding": Sharding.WEIGHTS,
            "overlaps_grad_reduce": True,
            "overlaps_param_gather": True,
            "num_optimizer_instances": number,
        }


def _num_nodes(config: RunConfig) -> int:
    """Nodes that the replicas of a layout lie on."""
    whole = replace(config, parallelism=replace(config.parallelism, num_optimizer_instances=1))
    return group_call(whole, Collective.ALL_REDUCE, GroupRole.DP, 1).num_nodes
