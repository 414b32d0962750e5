"""A layout as sums over operators and collectives: what each pass of each stage costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ..fit.laws import family as operator_family
from ..workload.collectives import Collective, CollectiveCall, CollectiveUse, GroupRole, Placement
from ..workload.config import RunConfig
from ..workload.operators import Operator, OperatorKind, Phase
from ..workload.stage_work import collective_uses, stage_operators

Floats = NDArray[np.float64]
Item = Operator | CollectiveCall
Times = Mapping[Item, Floats]
"""Seconds of each item, one entry per alternative."""


class Part(Enum):
    """Where the time of the critical stage goes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    TP = "tp"
    PP = "pp"
    DP = "dp"
    BUBBLE = "bubble"
    OPTIMIZER = "optimizer"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """What one rank of one stage does in a step."""

    operators: tuple[tuple[Operator, int], ...]
    """Counts per micro-batch, or per step where the phase is ``STEP``."""
    uses: tuple[CollectiveUse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds, one entry per alternative: per micro-batch up to ``hop_s``, then per step."""

    forward_s: Floats
    backward_s: Floats
    recompute_s: Floats
    host_forward_s: Floats
    host_backward_s: Floats
    tp_forward_s: Floats
    tp_backward_s: Floats
    hop_s: Floats
    """One message to the next stage; zero on the last."""
    reduce_s: Floats
    """Exposed time of the gradient reduction."""
    gather_s: Floats
    """Exposed time of the parameter gather."""
    tp_finish_s: Floats
    embedding_s: Floats
    optimizer_s: Floats
    host_step_s: Floats

    @property
    def forward_pass_s(self) -> Floats:
        """One forward pass of the stage, transfers over tp included."""
        return self.forward_s + self.host_forward_s + self.tp_forward_s

    @property
    def backward_pass_s(self) -> Floats:
        """One backward pass, recomputation and transfers over tp included."""
        return self.backward_s + self.recompute_s + self.host_backward_s + self.tp_backward_s


def stage_work(config: RunConfig) -> tuple[StageWork, ...]:
    """The work of every stage; middle stages share one value."""
    pp = config.parallelism.pp
    distinct = {s: _work(config, s) for s in sorted({0, min(1, pp - 1), pp - 1})}
    return tuple(distinct.get(s, distinct[min(1, pp - 1)]) for s in range(pp))


def items_of(works: Iterable[StageWork]) -> set[Item]:
    """Every distinct operator and collective."""
    out: set[Item] = set()
    for work in {id(work): work for work in works}.values():
        out.update(operator for operator, _ in work.operators)
        out.update(use.call for use in work.uses)
    return out


def item_name(item: Item) -> str:
    """Short name of an operator or collective.

    >>> item_name(CollectiveCall(collective=Collective.SEND, role=GroupRole.PP, num_ranks=2,
    ...                          nbytes=8))
    'send:pp'
    """
    if isinstance(item, Operator):
        return item.kind.value
    return f"{item.collective.value}:{item.role.value}"


def family(item: Item) -> str:
    """Name of the models whose errors the item shares: all linears, all transfers of one role...

    >>> family(CollectiveCall(collective=Collective.SEND, role=GroupRole.PP, num_ranks=2, nbytes=8))
    'pp'
    """
    if isinstance(item, Operator):
        return operator_family(item.kind).value
    return item.role.value


def stage_times(
    work: StageWork, times: Times, *, contention: float, is_host_only: bool
) -> StageTimes:
    """Sums over the work of a stage, with what overlaps taken off.

    On a device without streams of its own (``is_host_only``) nothing hides: the transfer uses the
    cores that compute.  Elsewhere a transfer that hides behind work slows both by ``contention``.
    """
    forward, backward, recompute = (
        _operators(work, times, phase) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)
    )
    tp_forward = _collectives(work, times, Placement.FORWARD, GroupRole.TP)
    tp_backward = _collectives(work, times, Placement.RECOMPUTE, GroupRole.TP)
    overlap = _Overlap(contention=contention, is_host_only=is_host_only)
    tp_backward = tp_backward + _tp_backward(work, times, overlap)
    return StageTimes(
        forward_s=forward,
        backward_s=backward,
        recompute_s=recompute,
        host_forward_s=_operators(work, times, Phase.FORWARD, OperatorKind.HOST_MICROBATCH),
        host_backward_s=_operators(work, times, Phase.BACKWARD, OperatorKind.HOST_MICROBATCH),
        tp_forward_s=tp_forward,
        tp_backward_s=tp_backward,
        hop_s=_hop(work, times),
        reduce_s=_bucketed(work, times, Placement.GRAD_REDUCE, backward + recompute, overlap),
        gather_s=_bucketed(work, times, Placement.PARAM_GATHER, forward, overlap),
        tp_finish_s=_collectives(work, times, Placement.GRAD_FINISH, GroupRole.TP),
        embedding_s=_collectives(work, times, Placement.GRAD_FINISH, GroupRole.EMBEDDING),
        optimizer_s=_operators(work, times, Phase.STEP),
        host_step_s=_operators(work, times, Phase.STEP, OperatorKind.HOST_STEP),
    )


def gathers_ahead(config: RunConfig) -> bool:
    """True where the gather of parameters runs beside the first forward pass."""
    par = config.parallelism
    return par.overlaps_param_gather and par.is_optimizer_distributed and config.device != "cpu"


def exposed_time(transfer_s: list[Floats], hidden_behind_s: Floats, contention: float) -> Floats:
    """Exposed part of transfers that are issued one after another while work goes on.

    All but the last run beside the part of the work that is still to come, (1 - 1/n) of it; the
    last one begins when the work ends.  Side by side both take ``contention`` times as long.
    """
    last = transfer_s[-1]
    before = np.sum(transfer_s[:-1], axis=0) if len(transfer_s) > 1 else np.zeros_like(last)
    window = hidden_behind_s * (1 - 1 / len(transfer_s))
    return last + _beyond(before, window, contention)


def _beyond(transfer_s: Floats, window_s: Floats, contention: float) -> Floats:
    together = np.minimum(transfer_s, window_s)
    slower = np.maximum(transfer_s, window_s) + (contention - 1) * together
    # Overlapping never costs more than running one after the other.
    return np.minimum(slower - window_s, transfer_s)


def _work(config: RunConfig, stage: int) -> StageWork:
    ops = stage_operators(config, stage)
    return StageWork(
        operators=(*ops.forward, *ops.backward, *ops.recompute, *ops.step),
        uses=collective_uses(config, stage=stage),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Overlap:
    contention: float
    is_host_only: bool


_HOST = (OperatorKind.HOST_MICROBATCH, OperatorKind.HOST_STEP)


def _operators(
    work: StageWork, times: Times, phase: Phase, host: OperatorKind | None = None
) -> Floats:
    """Sum of one pass: one host remainder, or everything but those."""
    total = _zero(times)
    for operator, count in work.operators:
        is_wanted = operator.kind is host if host else operator.kind not in _HOST
        if operator.phase is phase and is_wanted:
            total = total + count * times[operator]
    return total


def _collectives(work: StageWork, times: Times, place: Placement, role: GroupRole) -> Floats:
    total = _zero(times)
    for use in work.uses:
        if use.placement is place and use.call.role is role:
            total = total + use.count * times[use.call]
    return total


def _tp_backward(work: StageWork, times: Times, overlap: _Overlap) -> Floats:
    total = _zero(times)
    for use in work.uses:
        if use.placement is not Placement.BACKWARD:
            continue
        time_s = times[use.call]
        if use.hides_behind is not None and not overlap.is_host_only:
            half = _half_backward(work, times, use.hides_behind)
            time_s = _beyond(time_s, half, overlap.contention)
        total = total + use.count * time_s
    return total


def _half_backward(work: StageWork, times: Times, kind: OperatorKind) -> Floats:
    """One of the two products of a linear operator's backward."""
    found = [
        times[operator] / 2
        for operator, _ in work.operators
        if operator.kind is kind and operator.phase is Phase.BACKWARD
    ]
    return found[0]


def _bucketed(
    work: StageWork, times: Times, place: Placement, pass_s: Floats, overlap: _Overlap
) -> Floats:
    uses = [use for use in work.uses if use.placement is place]
    if not uses:
        return _zero(times)
    transfers = [use.count * times[use.call] for use in uses]
    if overlap.is_host_only or not uses[0].is_overlapped:
        return np.sum(transfers, axis=0)
    # The bucket that the backward phase fills last is the one that the forward phase needs first:
    # in both directions nothing hides it.
    return exposed_time(transfers, pass_s, overlap.contention)


def _hop(work: StageWork, times: Times) -> Floats:
    """A message takes what the slower of its two ends says."""
    found = [
        times[use.call]
        for use in work.uses
        if (use.placement, use.call.collective)
        in (
            (Placement.PIPELINE_FORWARD, Collective.SEND),
            (Placement.PIPELINE_BACKWARD, Collective.RECV),
        )
    ]
    return np.maximum(found[0], found[1]) if found else _zero(times)


def _zero(times: Times) -> Floats:
    return np.zeros_like(next(iter(times.values())))
