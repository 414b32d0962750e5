"""Transfers that nothing hides, and states and activations that every rank keeps whole."""

from __future__ import annotations

from collections.abc import Iterator

from ..arguments.megatron_rules import is_fsdp
from ..workload.config import Dispatcher
from .rule import Harm, Remedy, StatedRule, missing, with_experts, with_parallelism
from .stated_launch import StatedLaunch

_GUIDE = "docs/user-guide/parallelism-guide.md"
_MOE = "megatron/core/transformer/moe/README.md"


def _has_replicas(launch: StatedLaunch) -> bool:
    """Whether gradients are reduced as Megatron's own buckets do."""
    par = launch.config.parallelism
    # ``validate_args``: Muon takes none of the three.
    is_muon = "muon" in launch.text("--optimizer")
    return par.dp * par.cp > 1 and not is_fsdp(launch.config) and not is_muon


def _grad_reduce(launch: StatedLaunch) -> Iterator[Remedy]:
    if _has_replicas(launch) and not launch.config.parallelism.overlaps_grad_reduce:
        yield Remedy(
            what=missing("--overlap-grad-reduce"),
            put=(("--overlap-grad-reduce",),),
            layout=with_parallelism(launch, overlaps_grad_reduce=True),
        )


def _param_gather(launch: StatedLaunch) -> Iterator[Remedy]:
    par = launch.config.parallelism
    is_alone = not par.is_optimizer_distributed or par.overlaps_param_gather
    if is_alone or not _has_replicas(launch):
        return
    also = () if par.overlaps_grad_reduce else (("--overlap-grad-reduce",),)
    yield Remedy(
        what=missing("--overlap-param-gather"),
        put=(("--overlap-param-gather",), *also),
        layout=with_parallelism(launch, overlaps_grad_reduce=True, overlaps_param_gather=True),
    )


def _distributed_optimizer(launch: StatedLaunch) -> Iterator[Remedy]:
    if _has_replicas(launch) and not launch.config.parallelism.is_optimizer_distributed:
        yield Remedy(
            what=missing("--use-distributed-optimizer"),
            put=(("--use-distributed-optimizer",),),
            layout=with_parallelism(launch, is_optimizer_distributed=True),
        )


def _sequence_parallel(launch: StatedLaunch) -> Iterator[Remedy]:
    config, par = launch.config, launch.config.parallelism
    is_whole = par.tp > 1 and not par.is_sequence_parallel
    # Norms of PyTorch refuse it; recompute that splits over tp excludes it.
    if not is_whole or not launch.has_engine or config.distributes_saved_activations:
        return
    if config.local_seq_length % par.tp == 0:
        yield Remedy(
            what=missing("--sequence-parallel"),
            put=(("--sequence-parallel",),),
            layout=with_parallelism(launch, is_sequence_parallel=True),
        )


def _tp_overlap(launch: StatedLaunch) -> Iterator[Remedy]:
    par = launch.config.parallelism
    is_open = par.tp > 1 and par.is_sequence_parallel and not par.overlaps_tp
    # User buffers are those of ranks that see each other's memory.
    if is_open and launch.has_engine and par.tp <= (par.ranks_per_node or par.tp):
        yield Remedy(
            what=missing("--tp-comm-overlap"),
            put=(("--tp-comm-overlap",),),
            layout=with_parallelism(launch, overlaps_tp=True),
        )


def _messages(launch: StatedLaunch) -> Iterator[Remedy]:
    par, option = launch.config.parallelism, "--no-overlap-p2p-communication"
    if par.vp > 1 and not par.overlaps_p2p and launch.says(option):
        yield Remedy(
            what=option, drop=(option,), layout=with_parallelism(launch, overlaps_p2p=True)
        )


def _dispatcher(launch: StatedLaunch) -> Iterator[Remedy]:
    experts, ep = launch.config.model.experts, launch.config.parallelism.ep
    if experts is None or experts.dispatcher is not Dispatcher.ALL_GATHER:
        return
    # Every token goes to all ranks, in place of those of its top_k experts.
    if ep > experts.top_k:
        option = "--moe-token-dispatcher-type"
        yield Remedy(
            what=launch.written(option) if launch.says(option) else missing(f"{option} alltoall"),
            put=((option, "alltoall"),),
            layout=with_experts(launch, dispatcher=Dispatcher.ALL_TO_ALL),
        )


RULES = (
    StatedRule(
        name="overlap-grad-reduce",
        harm=Harm.WASTES,
        when="more than one replica, no `--overlap-grad-reduce`",
        why="gradients are reduced after the backward pass, with nothing beside",
        source=_GUIDE,
        find=_grad_reduce,
    ),
    StatedRule(
        name="overlap-param-gather",
        harm=Harm.WASTES,
        when="a distributed optimizer, no `--overlap-param-gather`",
        why="parameters are gathered before the forward pass, with nothing beside",
        source=_GUIDE,
        find=_param_gather,
    ),
    StatedRule(
        name="distributed-optimizer",
        harm=Harm.WASTES,
        when="more than one replica, no `--use-distributed-optimizer`",
        why="every replica keeps all states of the optimizer, and updates all parameters",
        source="docs/user-guide/features/dist_optimizer.md",
        find=_distributed_optimizer,
    ),
    StatedRule(
        name="sequence-parallel",
        harm=Harm.WASTES,
        when="tensor parallelism, no `--sequence-parallel`",
        why="every rank of a tp group keeps and computes norms and dropout of the whole sequence",
        source=_GUIDE,
        find=_sequence_parallel,
    ),
    StatedRule(
        name="tp-comm-overlap",
        harm=Harm.WASTES,
        when="sequence parallelism within a node, no `--tp-comm-overlap`",
        why="gathers and scatters of tp run before and after products, not inside them",
        source=_GUIDE,
        find=_tp_overlap,
    ),
    StatedRule(
        name="overlap-p2p",
        harm=Harm.WASTES,
        when="virtual stages and `--no-overlap-p2p-communication`",
        why="stages wait for each message instead of computing meanwhile",
        source="megatron/core/pipeline_parallel/schedules.py",
        find=_messages,
    ),
    StatedRule(
        name="moe-dispatcher",
        harm=Harm.WASTES,
        when="the dispatcher `allgather` with more ranks of experts than experts of a token",
        why="every token goes to all ranks of the experts",
        source=_MOE,
        find=_dispatcher,
    ),
)
