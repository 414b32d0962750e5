"""Everything that one rank of a stage does in a step: operators and collectives with counts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .blocks import BlockCount, chunk_blocks
from .collectives import Collective, CollectiveCall, CollectiveUse, GroupRole, Placement
from .config import Parallelism, RunConfig
from .operators import (
    OPTIMIZER_ELEMENT_NBYTES,
    Operator,
    OperatorCount,
    OperatorKind,
    Phase,
)
from .parameters import (
    Bucket,
    buckets,
    check_stage,
    grad_nbytes,
    sequence_parallel_numel,
    updated_parameters,
)
from .pieces import hidden_nbytes
from .ranks import group, group_call


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
    check_stage(config, stage)
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
    optimizer = Operator(
        kind=OperatorKind.OPTIMIZER,
        phase=Phase.STEP,
        shape=(updated_parameters(config, stage),),
        element_nbytes=OPTIMIZER_ELEMENT_NBYTES,
    )
    host = Operator(kind=OperatorKind.HOST_STEP, phase=Phase.STEP, shape=(), element_nbytes=0)
    return (optimizer, 1), (host, 1)


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
    check_stage(config, stage)
    uses: list[CollectiveUse] = []
    for chunk in config.chunks_of(stage):
        for block, count in chunk_blocks(config, chunk):
            uses += [replace(use, count=use.count * count) for use in block.uses]
        uses += pipeline_uses(config, chunk)
    return (*uses, *gradient_uses(config, stage))


def step_collectives(config: RunConfig, *, stage: int) -> tuple[tuple[CollectiveCall, int], ...]:
    """The same, as distinct calls with their number per step on one rank of ``stage``."""
    counts: dict[CollectiveCall, int] = {}
    for use in collective_uses(config, stage=stage):
        repeats = config.num_microbatches if use.placement.is_per_microbatch else 1
        counts[use.call] = counts.get(use.call, 0) + use.count * repeats
    return tuple(counts.items())


def hop_call(config: RunConfig, chunk: int, collective: Collective) -> CollectiveCall:
    """The message between a chunk and the next: the hidden states of one micro-batch."""
    par = config.parallelism
    return CollectiveCall(
        collective=collective,
        role=GroupRole.PP,
        num_ranks=par.pp,
        nbytes=hidden_nbytes(config) // (par.tp if par.is_sequence_parallel else 1),
        num_nodes=hop_num_nodes(par, chunk % par.pp),
    )


def hop_num_nodes(parallelism: Parallelism, stage: int) -> int:
    """2 where a rank of a stage and its partner in the next stage sit on two nodes, otherwise 1."""
    per_node = parallelism.ranks_per_node
    if not per_node or parallelism.pp == 1:
        return 1
    ranks = group(parallelism, GroupRole.PP, 0)
    here, there = ranks[stage], ranks[(stage + 1) % parallelism.pp]
    return 1 if here // per_node == there // per_node else 2


def pipeline_uses(config: RunConfig, chunk: int) -> tuple[CollectiveUse, ...]:
    """Messages of one micro-batch through a chunk, both passes."""
    uses: list[CollectiveUse] = []
    forward, backward = Placement.PIPELINE_FORWARD, Placement.PIPELINE_BACKWARD
    send, recv = Collective.SEND, Collective.RECV
    if chunk < config.parallelism.num_chunks - 1:
        uses.append(_use(hop_call(config, chunk, send), forward))
        uses.append(_use(hop_call(config, chunk, recv), backward))
    if chunk > 0:
        uses.append(_use(hop_call(config, chunk - 1, recv), forward))
        uses.append(_use(hop_call(config, chunk - 1, send), backward))
    return tuple(uses)


def gradient_uses(config: RunConfig, stage: int) -> tuple[CollectiveUse, ...]:
    """Reductions of gradients and gathers of parameters, once in a step."""
    model, par = config.model, config.parallelism
    uses: list[CollectiveUse] = []
    for chunk in config.chunks_of(stage):
        for bucket in buckets(config, chunk):
            uses += bucket_uses(config, bucket)
    if par.tp > 1 and par.is_sequence_parallel:
        nbytes = sequence_parallel_numel(config, stage) * grad_nbytes(config)
        call = group_call(config, Collective.ALL_REDUCE, GroupRole.TP, nbytes)
        uses.append(_use(call, Placement.GRAD_FINISH))
    if model.is_tied and par.pp > 1 and stage in (0, par.pp - 1):
        nbytes = model.vocab_size // par.tp * model.hidden_size * grad_nbytes(config)
        call = group_call(config, Collective.ALL_REDUCE, GroupRole.EMBEDDING, nbytes)
        uses.append(_use(call, Placement.GRAD_FINISH))
    return tuple(uses)


def bucket_uses(config: RunConfig, bucket: Bucket) -> tuple[CollectiveUse, ...]:
    """One reduction, and with the distributed optimizer one gather of the parameters."""
    par = config.parallelism
    role = GroupRole.EXPERT_DP if bucket.is_expert else GroupRole.DP
    is_split = par.is_optimizer_distributed
    kind = Collective.REDUCE_SCATTER if is_split else Collective.ALL_REDUCE
    reduce = group_call(config, kind, role, bucket.numel * grad_nbytes(config))
    if reduce.num_ranks == 1:
        return ()
    first = _use(reduce, Placement.GRAD_REDUCE, is_overlapped=par.overlaps_grad_reduce)
    if not is_split:
        return (first,)
    element_nbytes = 1 if config.keeps_fp8_params else config.precision.nbytes
    gather = group_call(config, Collective.ALL_GATHER, role, bucket.numel * element_nbytes)
    is_ahead = par.overlaps_param_gather
    return first, _use(gather, Placement.PARAM_GATHER, is_overlapped=is_ahead)


def _use(
    call: CollectiveCall, placement: Placement, *, is_overlapped: bool = False
) -> CollectiveUse:
    return CollectiveUse(call=call, count=1, placement=placement, is_overlapped=is_overlapped)


def _summed(blocks: list[BlockCount], phase: Phase) -> tuple[OperatorCount, ...]:
    counts: dict[Operator, int] = {}
    for block, repeats in blocks:
        for operator, count in block.operators:
            if operator.phase is phase:
                counts[operator] = counts.get(operator, 0) + repeats * count
    return tuple(counts.items())
