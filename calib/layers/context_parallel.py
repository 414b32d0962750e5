"""Core attention where the sequence is split over ranks, and the traffic that it takes.

As ``AttnFuncWithCPAndKVP2P``, ``...QKVOA2A`` and ``...KVAllGather`` of TransformerEngine 2 do it
for causal attention: each rank holds two of 2 cp parts of the sequence, one from either end, so
that all have equal work.
"""

from __future__ import annotations

from dataclasses import replace

from ..workload.collectives import Collective, CollectiveUse, GroupRole, Placement
from ..workload.config import ContextComm, RunConfig
from ..workload.operators import OperatorKind
from ..workload.ranks import group_call
from .layer_modules import Shaped, tokens_of, transfer


def core_attention(
    config: RunConfig, heads: int, groups: int, channels: int = 0
) -> tuple[Shaped, ...]:
    """Core attention of one micro-batch on one rank; ``channels`` of a head where not kv_channels.

    With all-to-all a rank has some of the heads and the whole sequence.  Otherwise it works through
    cp blocks: its own, which is causal, and cp - 1 that are half as large and full, which is the
    same work; so they count as cp causal calls at seq / cp.
    """
    par, model = config.parallelism, config.model
    seq, count = config.local_seq_length, par.cp
    if par.cp > 1 and par.context_comm is ContextComm.ALL_TO_ALL:
        heads, groups, seq, count = heads // par.cp, groups // par.cp, model.seq_length, 1
    shape = (config.batch.micro_batch_size, heads, groups, seq, channels or model.kv_channels)
    return ((OperatorKind.CORE_ATTENTION, shape, count),)


def context_uses(
    config: RunConfig, *, query_width: int, key_width: int, value_width: int
) -> tuple[CollectiveUse, ...]:
    """Transfers of attention over cp; widths are those of a token on one rank.

    Point to point: keys and values go round the ring beside the blocks, cp - 1 times, and backwards
    their gradients with them.  Each send goes with a receive of the same size from the other
    neighbour at the same time, which is not listed.  All-to-all: queries, keys, values and output,
    backwards the gradients of each.  All-gather: keys and values, and again backwards, where their
    gradients are scattered.
    """
    if config.parallelism.cp == 1:
        return ()
    nbytes = tokens_of(config) * config.precision.nbytes
    forward, backward = Placement.FORWARD, Placement.BACKWARD
    match config.parallelism.context_comm:
        case ContextComm.P2P:
            both = nbytes * (key_width + value_width)
            rounds = config.parallelism.cp - 1
            send = group_call(config, Collective.SEND, GroupRole.CP, both)
            use = replace(transfer(send, forward, OperatorKind.CORE_ATTENTION), count=rounds)
            return use, replace(use, placement=backward, count=2 * rounds)
        case ContextComm.ALL_TO_ALL:
            widths = (query_width, key_width, value_width, value_width * query_width // key_width)
            return tuple(
                _use(config, Collective.ALL_TO_ALL, nbytes * width, placement)
                for placement in (forward, backward)
                for width in widths
            )
        case ContextComm.ALL_GATHER:
            whole = nbytes * config.parallelism.cp
            return tuple(
                _use(config, collective, whole * width, placement)
                for collective, placement in (
                    (Collective.ALL_GATHER, forward),
                    (Collective.ALL_GATHER, backward),
                    (Collective.REDUCE_SCATTER, backward),
                )
                for width in (key_width, value_width)
            )


def _use(
    config: RunConfig, collective: Collective, nbytes: int, placement: Placement
) -> CollectiveUse:
    return transfer(group_call(config, collective, GroupRole.CP, nbytes), placement)
