"""Everything that one rank of a stage does in a step: operators and collectives with counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from ..errors import ConfigError
from ..workload import (
    Collective,
    CollectiveCall,
    CollectiveUse,
    Engine,
    GroupRole,
    Operator,
    OperatorCount,
    OperatorKind,
    Parallelism,
    Phase,
    Placement,
    RunConfig,
    group,
    group_call,
    optimizer_operator,
)
from .blocks import BlockCount, chunk_blocks
from .buckets import Bucket, buckets, num_shards
from .layer_modules import between_ranks, hidden_nbytes, transfer
from .sharding import gathered_nbytes
from .tensors import BlockNumel


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOperators:
    """What one rank of a stage runs: three lists per micro-batch, one per step."""

    forward: tuple[OperatorCount, ...]
    backward: tuple[OperatorCount, ...]
    recompute: tuple[OperatorCount, ...]
    """Forward operators that run again within the backward pass."""
    step: tuple[OperatorCount, ...]


def stage_operators(config: RunConfig, stage: int) -> StageOperators:
    """The operators of one micro-batch on one rank of ``stage``, and those of a step.

    Every model operator carries the element size of the activations, ``OPTIMIZER`` that of fp32,
    and the two host remainders none (0); there is one ``HOST_MICROBATCH`` for each chunk.
    """
    _check_stage(config, stage)
    chunks = config.chunks_of(stage)
    blocks = [entry for chunk in chunks for entry in chunk_blocks(config, chunk)]
    return StageOperators(
        forward=(*_summed(blocks, Phase.FORWARD), host_pass(Phase.FORWARD, len(chunks))),
        backward=(*_summed(blocks, Phase.BACKWARD), host_pass(Phase.BACKWARD, len(chunks))),
        recompute=_summed(blocks, Phase.RECOMPUTE),
        step=step_operators(config, stage),
    )


def step_operators(config: RunConfig, stage: int) -> tuple[OperatorCount, ...]:
    """The operators that one rank of ``stage`` runs once in a step."""
    updated = updated_parameters(config, stage)
    optimizer = optimizer_operator(
        updated,
        calls=sharded_calls(config, stage),
        moved_nbytes=config.optimizer_moved_nbytes,
        host_parameters=round(config.optimizer_offload_frac * updated),
        is_overlapped=config.overlaps_optimizer_offload,
    )
    host = Operator(kind=OperatorKind.HOST_STEP, phase=Phase.STEP, shape=(), element_nbytes=0)
    return (optimizer, 1), (host, 1)


def updated_parameters(config: RunConfig, stage: int) -> int:
    """Parameters that one rank of ``stage`` updates: a share when the optimizer is distributed."""
    par, (dense, experts) = config.parallelism, held_parameters(config, stage)
    return -(-dense // num_shards(par)) - (-experts // num_shards(par, is_expert=True))


def held_parameters(config: RunConfig, stage: int) -> tuple[int, int]:
    """Parameters of one rank of ``stage``, and those of its experts, before any sharding."""
    held = _stage_numel(config, stage)
    dense = sum(numel.dense * count for numel, count in held)
    return dense, sum(numel.expert * count for numel, count in held)


def sharded_calls(config: RunConfig, stage: int) -> int:
    """Calls of the optimizer on sharded tensors in a step of one rank of ``stage``, by its share of
    all tensors; 0 where these are plain."""
    par = config.parallelism
    if not (config.sharded_update_calls and par.shards_weights):
        return 0
    held = [
        sum(len(block.tensors) * count for block, count in chunk_blocks(config, chunk))
        for chunk in range(par.num_chunks)
    ]
    here = sum(held[chunk] for chunk in config.chunks_of(stage))
    return -(-config.sharded_update_calls * here // sum(held))


def host_pass(phase: Phase, count: int = 1) -> OperatorCount:
    """What the host adds to one pass of one chunk."""
    kind = OperatorKind.HOST_MICROBATCH
    return Operator(kind=kind, phase=phase, shape=(), element_nbytes=0), count


def collective_uses(config: RunConfig, *, stage: int) -> tuple[CollectiveUse, ...]:
    """Every collective that one rank of ``stage`` issues in a step, with its place.

    Follows ``megatron.core`` 0.16.1.  Left out, because they are small: gradient norm, found-inf
    and zero counts (``MODEL``), the loss and token counts of the training script, and its broadcast
    of batches over tp.  Groups of one rank carry nothing and are left out as well.
    """
    _check_stage(config, stage)
    uses: list[CollectiveUse] = []
    for chunk in config.chunks_of(stage):
        for block, count in chunk_blocks(config, chunk):
            uses += [replace(use, count=use.count * count) for use in block.uses]
        uses += pipeline_uses(config, chunk)
    return (*uses, *gradient_uses(config, stage))


def step_collectives(config: RunConfig, *, stage: int) -> tuple[tuple[CollectiveCall, int], ...]:
    """The same, as distinct calls with their number per step on one rank of ``stage``."""
    counts: Counter[CollectiveCall] = Counter()
    for use in collective_uses(config, stage=stage):
        repeats = config.num_microbatches if use.placement.is_per_microbatch else 1
        counts[use.call] += use.count * repeats
    return tuple(counts.items())


def p2p_call(config: RunConfig, chunk: int, collective: Collective) -> CollectiveCall:
    """The message between a chunk and the next: the hidden states of one micro-batch."""
    par = config.parallelism
    # Under DeepSpeed the ranks of a tp group share a message.
    is_split = par.is_sequence_parallel or par.engine is Engine.DEEPSPEED
    return CollectiveCall(
        collective=collective,
        role=GroupRole.PP,
        num_ranks=par.pp,
        nbytes=hidden_nbytes(config) // (par.tp if is_split else 1),
        num_nodes=p2p_num_nodes(par, chunk % par.pp),
    )


def p2p_num_nodes(parallelism: Parallelism, stage: int) -> int:
    """2 where a rank of a stage and its partner in the next stage sit on two nodes, otherwise 1."""
    per_node = parallelism.ranks_per_node
    if not per_node or parallelism.pp == 1:
        return 1
    ranks = group(parallelism, GroupRole.PP, 0)
    here, there = ranks[stage], ranks[(stage + 1) % parallelism.pp]
    return 1 if here // per_node == there // per_node else 2


def pipeline_uses(config: RunConfig, chunk: int) -> tuple[CollectiveUse, ...]:
    """Messages of one micro-batch through a chunk, both passes."""
    forward, backward = Placement.PIPELINE_FORWARD, Placement.PIPELINE_BACKWARD
    send, recv = Collective.SEND, Collective.RECV
    last = config.parallelism.num_chunks - 1
    return tuple(
        transfer(p2p_call(config, before, collective), placement)
        for before, collectives in ((chunk, (send, recv)), (chunk - 1, (recv, send)))
        for collective, placement in zip(collectives, (forward, backward), strict=True)
        if 0 <= before < last
    )


def gradient_uses(config: RunConfig, stage: int) -> tuple[CollectiveUse, ...]:
    """Reductions of gradients and gathers of parameters, once in a step."""
    model, par = config.model, config.parallelism
    uses: list[CollectiveUse] = []
    known: dict[Bucket, tuple[CollectiveUse, ...]] = {}
    for chunk in config.chunks_of(stage):
        found: list[CollectiveUse] = []
        for bucket in buckets(config, chunk):
            if bucket not in known:
                known[bucket] = bucket_uses(config, bucket)
            found += known[bucket]
        # Past its first chunk, a stage issues all buckets of a chunk in one call.
        uses += found if chunk < par.pp else _coalesced(found)
    if len({bucket.is_expert for bucket in known}) > 1 and not par.overlaps_param_gather:
        # Experts and the rest have an optimizer each, and either gathers all after its step.
        uses = [_repeated(use) for use in uses]
    nbytes = _tp_reduced_numel(config, stage) * config.grad_nbytes
    if par.tp > 1 and nbytes:
        call = group_call(config, Collective.ALL_REDUCE, GroupRole.TP, nbytes)
        uses.append(transfer(call, Placement.GRAD_FINISH))
    shares_embedding = model.is_tied or model.num_prediction_layers > 0
    if shares_embedding and par.pp > 1 and stage in (0, par.pp - 1):
        nbytes = model.vocab_size // par.tp * model.hidden_size * config.grad_nbytes
        call = group_call(config, Collective.ALL_REDUCE, GroupRole.EMBEDDING, nbytes)
        uses.append(transfer(call, Placement.GRAD_FINISH))
    return tuple(uses)


def bucket_uses(config: RunConfig, bucket: Bucket) -> tuple[CollectiveUse, ...]:
    """Its reduction, and with the distributed optimizer the gather of its parameters.

    Several instances of the optimizer scatter within one and then reduce each shard over all.  What
    is sharded deeper travels with the blocks (``sharding``).
    """
    par = config.parallelism
    role = GroupRole.EXPERT_DP if bucket.is_expert else GroupRole.DP
    nbytes = bucket.numel * config.grad_nbytes
    is_split, is_beside = par.is_optimizer_distributed, par.overlaps_grad_reduce
    uses: list[CollectiveUse] = []
    if not par.shards_grads:
        scatters = is_split and par.engine is not Engine.DEEPSPEED
        kind = Collective.REDUCE_SCATTER if scatters else Collective.ALL_REDUCE
        # Who sums whole gradients does so over all replicas, however few share the optimizer.
        summed = config if scatters else _in_one_instance(config)
        reduce = group_call(summed, kind, role, nbytes)
        uses.append(transfer(reduce, Placement.GRAD_REDUCE, is_overlapped=is_beside))
        if scatters:
            across = GroupRole.DP_INSTANCES
            shard = group_call(config, Collective.ALL_REDUCE, across, nbytes // reduce.num_ranks)
            uses.append(transfer(shard, Placement.GRAD_REDUCE, is_overlapped=is_beside))
    if is_split and not par.shards_weights:
        gathered = bucket.numel * gathered_nbytes(config, is_quantized=bucket.is_quantized)
        gather = group_call(config, Collective.ALL_GATHER, role, gathered)
        is_ahead = par.overlaps_param_gather
        uses.append(transfer(gather, Placement.PARAM_GATHER, is_overlapped=is_ahead))
    return between_ranks(uses)


def _in_one_instance(config: RunConfig) -> RunConfig:
    par = config.parallelism
    if par.num_optimizer_instances == 1:
        return config
    return replace(config, parallelism=replace(par, num_optimizer_instances=1))


def _tp_reduced_numel(config: RunConfig, stage: int) -> int:
    """Elements that every tp rank holds with a part of their gradient, which is summed over tp.

    Under sequence parallelism norms and biases after row-parallel linears; always the norms of
    queries and keys (``_allreduce_non_tensor_model_parallel_grads``).
    """
    is_split = config.parallelism.is_sequence_parallel
    return sum(
        (numel.head_parallel + is_split * numel.sequence_parallel) * count
        for numel, count in _stage_numel(config, stage)
    )


def _stage_numel(config: RunConfig, stage: int) -> list[tuple[BlockNumel, int]]:
    _check_stage(config, stage)
    return [
        (block.numel, count)
        for chunk in config.chunks_of(stage)
        for block, count in chunk_blocks(config, chunk)
    ]


def _check_stage(config: RunConfig, stage: int) -> None:
    if not 0 <= stage < config.parallelism.pp:
        raise ConfigError(
            f"stage {stage} is not in pp {config.parallelism.pp}; "
            f"choose from 0 to {config.parallelism.pp - 1}"
        )


def _repeated(use: CollectiveUse) -> CollectiveUse:
    return replace(use, count=2 * use.count) if use.placement is Placement.PARAM_GATHER else use


def _coalesced(uses: list[CollectiveUse]) -> list[CollectiveUse]:
    joined: dict[tuple[Collective, GroupRole, Placement], CollectiveUse] = {}
    for use in uses:
        key = (use.call.collective, use.call.role, use.placement)
        before = joined.get(key)
        nbytes = use.call.nbytes + (0 if before is None else before.call.nbytes)
        joined[key] = replace(use, call=replace(use.call, nbytes=nbytes))
    return list(joined.values())


def _summed(blocks: list[BlockCount], phase: Phase) -> tuple[OperatorCount, ...]:
    counts: Counter[Operator] = Counter()
    for block, repeats in blocks:
        for operator, count in block.operators:
            if operator.phase is phase:
                counts[operator] += repeats * count
    return tuple(counts.items())
