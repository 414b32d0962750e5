"""The collectives of a step: identity, and the list of them that a layout issues."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .config import PositionEmbedding, RunConfig
from .operators import OperatorKind, recomputed_layers
from .parameters import buckets, check_stage, grad_nbytes, sequence_parallel_numel


class Collective(Enum):
    """A transfer among the ranks of a group; ``nbytes`` is counted as nccl-tests does."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"
    RECV = "recv"
    OTHER = "other"


class GroupRole(Enum):
    """What a process group is for; the hooks derive it from Megatron's ``group_desc``."""

    TP = "tp"
    PP = "pp"
    DP = "dp"
    EMBEDDING = "embedding"
    MODEL = "model"
    WORLD = "world"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One collective as one rank issues it.

    ``nbytes`` is the payload of the whole group as nccl-tests counts it: the reduced buffer for
    all-reduce, the gathered buffer for all-gather and reduce-scatter, the message for send/recv.
    """

    collective: Collective
    role: GroupRole
    num_ranks: int
    nbytes: int


class Placement(Enum):
    """Where in the step a collective runs; the first five once per micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    PIPELINE_FORWARD = "pipeline_forward"
    PIPELINE_BACKWARD = "pipeline_backward"
    GRAD_REDUCE = "grad_reduce"
    GRAD_FINISH = "grad_finish"
    PARAM_GATHER = "param_gather"

    @property
    def is_per_microbatch(self) -> bool:
        """True where the collective is issued again for every micro-batch."""
        return self not in (Placement.GRAD_REDUCE, Placement.GRAD_FINISH, Placement.PARAM_GATHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """A collective with its place; ``count`` is per micro-batch or per step as placed."""

    call: CollectiveCall
    count: int
    placement: Placement
    is_overlapped: bool = False
    """Issued asynchronously: only what does not fit behind other work is exposed."""
    hides_behind: OperatorKind | None = None
    """The operator whose backward (half of it: one of its two products) may hide the transfer."""


def collective_uses(config: RunConfig, *, stage: int) -> tuple[CollectiveUse, ...]:
    """Every collective that one rank of ``stage`` issues in a step, with its place.

    Follows ``megatron.core`` 0.16.1.  Left out, because they are small: gradient norm, found-inf
    and zero counts (``MODEL``), the loss and token counts of the training script, and its broadcast
    of batches over tp.  Groups of one rank carry nothing and are left out as well.
    """
    check_stage(config, stage)
    uses = _tensor_uses(config, stage) if config.parallelism.tp > 1 else []
    uses += _pipeline_uses(config, stage)
    uses += _gradient_uses(config, stage)
    return tuple(use for use in uses if use.count)


def step_collectives(config: RunConfig, *, stage: int) -> tuple[tuple[CollectiveCall, int], ...]:
    """The same, as distinct calls with their number per step on one rank of ``stage``."""
    counts: dict[CollectiveCall, int] = {}
    for use in collective_uses(config, stage=stage):
        repeats = config.num_microbatches if use.placement.is_per_microbatch else 1
        counts[use.call] = counts.get(use.call, 0) + use.count * repeats
    return tuple(counts.items())


def _tensor_uses(config: RunConfig, stage: int) -> list[CollectiveUse]:
    uses = _layer_uses(config, Placement.FORWARD, config.layers_per_stage)
    uses += _layer_uses(config, Placement.RECOMPUTE, recomputed_layers(config))
    uses += _dgrad_uses(config, OperatorKind.LINEAR_QKV, config.layers_per_stage)
    uses += _dgrad_uses(config, OperatorKind.LINEAR_FC1, config.layers_per_stage)
    gathers = 2 * config.layers_per_stage
    if config.parallelism.is_sequence_parallel:
        call = _hidden_call(config, Collective.ALL_GATHER)
        uses.append(CollectiveUse(call=call, count=gathers, placement=Placement.BACKWARD))
    if stage == 0:
        uses += _embedding_uses(config)
    if stage == config.parallelism.pp - 1:
        uses += _head_uses(config)
    return uses


def _layer_uses(config: RunConfig, placement: Placement, num_layers: int) -> list[CollectiveUse]:
    """After proj and fc2; under sequence parallelism also before qkv and fc1."""
    if not config.parallelism.is_sequence_parallel:
        call = _hidden_call(config, Collective.ALL_REDUCE)
        return [CollectiveUse(call=call, count=2 * num_layers, placement=placement)]
    return [
        CollectiveUse(call=_hidden_call(config, kind), count=2 * num_layers, placement=placement)
        for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    ]


def _dgrad_uses(config: RunConfig, kind: OperatorKind, count: int) -> list[CollectiveUse]:
    """Backward of a column-parallel product: asynchronous, behind one of its two products."""
    kinds = [Collective.ALL_REDUCE]
    if config.parallelism.is_sequence_parallel:
        kinds = [Collective.ALL_GATHER, Collective.REDUCE_SCATTER]
    return [
        CollectiveUse(
            call=_hidden_call(config, c),
            count=count,
            placement=Placement.BACKWARD,
            is_overlapped=True,
            hides_behind=kind,
        )
        for c in kinds
    ]


def _embedding_uses(config: RunConfig) -> list[CollectiveUse]:
    if not config.parallelism.is_sequence_parallel:
        call = _hidden_call(config, Collective.ALL_REDUCE)
        return [CollectiveUse(call=call, count=1, placement=Placement.FORWARD)]
    # With learned positions Megatron reduces in full and then splits; otherwise it scatters.
    is_split = config.model.position_embedding is PositionEmbedding.LEARNED
    kind = Collective.ALL_REDUCE if is_split else Collective.REDUCE_SCATTER
    return [
        CollectiveUse(call=_hidden_call(config, kind), count=1, placement=Placement.FORWARD),
        CollectiveUse(
            call=_hidden_call(config, Collective.ALL_GATHER), count=1, placement=Placement.BACKWARD
        ),
    ]


def _head_uses(config: RunConfig) -> list[CollectiveUse]:
    """Gather before the logits, three sums of fp32 per token in the loss, dgrad of the logits."""
    tokens = config.batch.micro_batch_size * config.model.seq_length
    loss = _call(Collective.ALL_REDUCE, GroupRole.TP, config.parallelism.tp, tokens * 4)
    uses = [CollectiveUse(call=loss, count=3, placement=Placement.FORWARD)]
    if config.parallelism.is_sequence_parallel:
        call = _hidden_call(config, Collective.ALL_GATHER)
        uses.append(CollectiveUse(call=call, count=1, placement=Placement.FORWARD))
    return uses + _dgrad_uses(config, OperatorKind.LOGITS, 1)


def _pipeline_uses(config: RunConfig, stage: int) -> list[CollectiveUse]:
    par = config.parallelism
    nbytes = _hidden_nbytes(config) // (par.tp if par.is_sequence_parallel else 1)
    send = _call(Collective.SEND, GroupRole.PP, par.pp, nbytes)
    recv = _call(Collective.RECV, GroupRole.PP, par.pp, nbytes)
    uses: list[CollectiveUse] = []
    if stage < par.pp - 1:
        uses.append(CollectiveUse(call=send, count=1, placement=Placement.PIPELINE_FORWARD))
        uses.append(CollectiveUse(call=recv, count=1, placement=Placement.PIPELINE_BACKWARD))
    if stage > 0:
        uses.append(CollectiveUse(call=recv, count=1, placement=Placement.PIPELINE_FORWARD))
        uses.append(CollectiveUse(call=send, count=1, placement=Placement.PIPELINE_BACKWARD))
    return uses


def _gradient_uses(config: RunConfig, stage: int) -> list[CollectiveUse]:
    model, par = config.model, config.parallelism
    uses: list[CollectiveUse] = []
    if par.dp > 1:
        uses += _bucket_uses(config, stage)
    if par.tp > 1 and par.is_sequence_parallel:
        nbytes = sequence_parallel_numel(config, stage) * grad_nbytes(config)
        call = _call(Collective.ALL_REDUCE, GroupRole.TP, par.tp, nbytes)
        uses.append(CollectiveUse(call=call, count=1, placement=Placement.GRAD_FINISH))
    if model.is_tied and par.pp > 1 and stage in (0, par.pp - 1):
        nbytes = model.vocab_size // par.tp * model.hidden_size * grad_nbytes(config)
        call = _call(Collective.ALL_REDUCE, GroupRole.EMBEDDING, 2, nbytes)
        uses.append(CollectiveUse(call=call, count=1, placement=Placement.GRAD_FINISH))
    return uses


def _bucket_uses(config: RunConfig, stage: int) -> list[CollectiveUse]:
    """One reduction per bucket, and with the distributed optimizer one gather of parameters."""
    par = config.parallelism
    is_split = par.is_optimizer_distributed
    kind = Collective.REDUCE_SCATTER if is_split else Collective.ALL_REDUCE
    uses: list[CollectiveUse] = []
    for numel in buckets(config, stage):
        call = _call(kind, GroupRole.DP, par.dp, numel * grad_nbytes(config))
        uses.append(
            CollectiveUse(
                call=call,
                count=1,
                placement=Placement.GRAD_REDUCE,
                is_overlapped=par.overlaps_grad_reduce,
            )
        )
        if is_split:
            call = _call(
                Collective.ALL_GATHER, GroupRole.DP, par.dp, numel * config.precision.nbytes
            )
            uses.append(
                CollectiveUse(
                    call=call,
                    count=1,
                    placement=Placement.PARAM_GATHER,
                    is_overlapped=par.overlaps_param_gather,
                )
            )
    return uses


def _hidden_nbytes(config: RunConfig) -> int:
    tokens = config.batch.micro_batch_size * config.model.seq_length
    return tokens * config.model.hidden_size * config.precision.nbytes


def _hidden_call(config: RunConfig, collective: Collective) -> CollectiveCall:
    return _call(collective, GroupRole.TP, config.parallelism.tp, _hidden_nbytes(config))


def _call(collective: Collective, role: GroupRole, num_ranks: int, nbytes: int) -> CollectiveCall:
    return CollectiveCall(collective=collective, role=role, num_ranks=num_ranks, nbytes=nbytes)
