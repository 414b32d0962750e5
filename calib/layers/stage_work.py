"""Work of one rank of a stage in a step: operators and collectives with counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from ..errors import ConfigError
from ..workload.collectives import Collective, CollectiveCall, CollectiveUse, GroupRole, Placement
from ..workload.config import RunConfig
from ..workload.operators import Operator, OperatorCount, OperatorKind, Phase, optimizer_operator
from ..workload.parallelism import Parallelism
from ..workload.ranks import group, group_call
from .blocks import BlockCount, chunk_blocks
from .buckets import Bucket, buckets, num_shards
from .layer_modules import between_ranks, hidden_nbytes, transfer
from .sharding import gathered_nbytes
from .tensors import BlockNumel


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOperators:
    """Operators of one rank of a stage: three lists per micro-batch, one per step."""

    forward: tuple[OperatorCount, ...]
    backward: tuple[OperatorCount, ...]
    recompute: tuple[OperatorCount, ...]
    """Forward operators that the backward pass recomputes."""
    step: tuple[OperatorCount, ...]


def stage_operators(config: RunConfig, stage: int) -> StageOperators:
    """Return the operators of one micro-batch on one rank of ``stage``, and those of a step.

    Every model operator has the element size of the activations, ``OPTIMIZER`` that of fp32, and
    the two host remainders 0; there is one ``HOST_MICROBATCH`` for each chunk.
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
    """Return the operators that one rank of ``stage`` runs once in a step."""
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
    """Return the number of parameters that one rank of ``stage`` updates: its share if the
    optimizer is distributed."""
    par, (dense, experts) = config.parallelism, stage_parameters(config, stage)
    return -(-dense // num_shards(par)) - (-experts // num_shards(par, is_expert=True))


def stage_parameters(config: RunConfig, stage: int) -> tuple[int, int]:
    """Return the dense and the expert parameters of one rank of ``stage``, before any sharding."""
    numel_counts = _stage_numel(config, stage)
    dense = sum(numel.dense * count for numel, count in numel_counts)
    return dense, sum(numel.expert * count for numel, count in numel_counts)


def sharded_calls(config: RunConfig, stage: int) -> int:
    """Return the optimizer calls on sharded tensors in a step of one rank of ``stage``, by its
    share of all tensors; 0 if tensors are plain."""
    par = config.parallelism
    if not (config.sharded_update_calls and par.shards_weights):
        return 0
    tensors_per_chunk = [
        sum(len(block.tensors) * count for block, count in chunk_blocks(config, chunk))
        for chunk in range(par.num_chunks)
    ]
    here = sum(tensors_per_chunk[chunk] for chunk in config.chunks_of(stage))
    return -(-config.sharded_update_calls * here // sum(tensors_per_chunk))


def host_pass(phase: Phase, count: int = 1) -> OperatorCount:
    """Return the host time added to one pass, counted once per chunk."""
    kind = OperatorKind.HOST_MICROBATCH
    return Operator(kind=kind, phase=phase, shape=(), element_nbytes=0), count


def collective_uses(config: RunConfig, *, stage: int) -> tuple[CollectiveUse, ...]:
    """Return every collective that one rank of ``stage`` issues in a step, with its placement.

    The list follows ``megatron.core`` 0.16.1.  Omitted because they are small: gradient norm,
    found-inf and zero counts (``MODEL``), the loss and token counts of the training script, and its
    broadcast of batches over tp.  Groups of one rank carry nothing and are omitted too.
    """
    _check_stage(config, stage)
    uses: list[CollectiveUse] = []
    for chunk in config.chunks_of(stage):
        for block, count in chunk_blocks(config, chunk):
            uses += [replace(use, count=use.count * count) for use in block.uses]
        uses += pipeline_uses(config, chunk)
    return (*uses, *gradient_uses(config, stage))


def step_collectives(config: RunConfig, *, stage: int) -> tuple[tuple[CollectiveCall, int], ...]:
    """Return the distinct calls of ``collective_uses`` with their number per step."""
    counts: Counter[CollectiveCall] = Counter()
    for use in collective_uses(config, stage=stage):
        repeats = config.num_microbatches if use.placement.is_per_microbatch else 1
        counts[use.call] += use.count * repeats
    return tuple(counts.items())


def p2p_call(config: RunConfig, chunk: int, collective: Collective) -> CollectiveCall:
    """Return the message between a chunk and the next: the hidden states of one micro-batch."""
    par = config.parallelism
    return CollectiveCall(
        collective=collective,
        role=GroupRole.PP,
        num_ranks=par.pp,
        nbytes=hidden_nbytes(config) // (par.tp if par.is_sequence_parallel else 1),
        num_nodes=p2p_num_nodes(par, chunk % par.pp),
    )


def p2p_num_nodes(parallelism: Parallelism, stage: int) -> int:
    """Return 2 if a rank of a stage and its peer in the next stage are on two nodes, else 1."""
    per_node = parallelism.ranks_per_node
    if not per_node or parallelism.pp == 1:
        return 1
    ranks = group(parallelism, GroupRole.PP, 0)
    here, there = ranks[stage], ranks[(stage + 1) % parallelism.pp]
    return 1 if here // per_node == there // per_node else 2


def pipeline_uses(config: RunConfig, chunk: int) -> tuple[CollectiveUse, ...]:
    """Return the pipeline messages of one micro-batch through a chunk, both passes."""
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
    """Return the gradient reductions and parameter gathers of a step."""
    model, par = config.model, config.parallelism
    uses: list[CollectiveUse] = []
    known: dict[Bucket, tuple[CollectiveUse, ...]] = {}
    for chunk in config.chunks_of(stage):
        chunk_uses: list[CollectiveUse] = []
        for bucket in buckets(config, chunk):
            if bucket not in known:
                known[bucket] = bucket_uses(config, bucket)
            chunk_uses += known[bucket]
        # Past its first chunk, a stage issues all buckets of a chunk in one call.
        uses += chunk_uses if chunk < par.pp else _coalesced(chunk_uses)
    if len({bucket.is_expert for bucket in known}) > 1 and not par.overlaps_param_gather:
        # Experts and the rest have separate optimizers, and each gathers all after its step.
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
    """Return the reduction of a bucket, and with the distributed optimizer its parameter gather.

    With several optimizer instances, gradients are scattered within one and each shard is then
    reduced over all.  Traffic of deeper sharding belongs to the blocks (``sharding``).
    """
    par = config.parallelism
    role = GroupRole.EXPERT_DP if bucket.is_expert else GroupRole.DP
    nbytes = bucket.numel * config.grad_nbytes
    is_split, is_overlapped = par.is_optimizer_distributed, par.overlaps_grad_reduce
    uses: list[CollectiveUse] = []
    if not par.shards_grads:
        kind = Collective.REDUCE_SCATTER if is_split else Collective.ALL_REDUCE
        reduce = group_call(config, kind, role, nbytes)
        uses.append(transfer(reduce, Placement.GRAD_REDUCE, is_overlapped=is_overlapped))
        if is_split:
            across = GroupRole.DP_INSTANCES
            shard = group_call(config, Collective.ALL_REDUCE, across, nbytes // reduce.num_ranks)
            uses.append(transfer(shard, Placement.GRAD_REDUCE, is_overlapped=is_overlapped))
    if is_split and not par.shards_weights:
        gathered = bucket.numel * gathered_nbytes(config, is_quantized=bucket.is_quantized)
        gather = group_call(config, Collective.ALL_GATHER, role, gathered)
        is_ahead = par.overlaps_param_gather
        uses.append(transfer(gather, Placement.PARAM_GATHER, is_overlapped=is_ahead))
    return between_ranks(uses)


def _tp_reduced_numel(config: RunConfig, stage: int) -> int:
    """Return the elements that are replicated over tp with partial gradients, summed over tp.

    These are norms and biases after row-parallel linears under sequence parallelism, and always the
    norms of queries and keys (``_allreduce_non_tensor_model_parallel_grads``).
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
