"""Core attention where the sequence is split over ranks, and the traffic that it takes.

As ``AttnFuncWithCPAndKVP2P``, ``...QKVOA2A`` and ``...KVAllGather`` of TransformerEngine 2 do it
for causal attention, the first also among groups whose ranks exchange heads (``a2a+p2p``): each
rank holds two of 2 cp parts of the sequence, one from either end, so that all have equal work.
"""

from __future__ import annotations

from dataclasses import replace

from ..workload.collectives import Collective, CollectiveUse, GroupRole, Placement
from ..workload.config import ContextComm, RunConfig
from ..workload.operators import OperatorKind
from ..workload.ranks import group, group_call
from .layer_modules import Shaped, tokens_of, transfer


def core_attention(
    config: RunConfig, heads: int, groups: int, channels: int = 0
) -> tuple[Shaped, ...]:
    """Core attention of one micro-batch on one rank; ``channels`` of a head where not kv_channels.

    With all-to-all a rank has some of the heads and the whole sequence, or that of its neighbours.
    Otherwise it works through as many blocks as there are parts of the sequence: its own, which is
    causal, and others that are half as large and full, which is the same work; so n parts count as
    n causal calls at seq / n.
    """
    par, model = config.parallelism, config.model
    inner = par.exchanged_cp
    num_parts = par.cp // inner
    shape = (
        *(config.batch.micro_batch_size, heads // inner, groups // inner),
        *(model.seq_length // num_parts, channels or model.kv_channels),
    )
    return ((OperatorKind.CORE_ATTENTION, shape, num_parts),)


def context_uses(
    config: RunConfig, *, query_width: int, key_width: int, value_width: int
) -> tuple[CollectiveUse, ...]:
    """Transfers of attention over cp; widths are those of a token on one rank.

    Point to point: keys and values go round the ring beside the blocks, cp - 1 times, and backwards
    their gradients with them.  Each send goes with a receive of the same size from the other
    neighbour at the same time, which is not listed.  All-to-all: queries, keys, values and output,
    backwards the gradients of each.  A ring of groups has both, at the same bytes: keys and values
    of all neighbours, of fewer heads.  All-gather: keys and values, and again backwards, where
    their gradients are scattered.
    """
    if config.parallelism.cp == 1:
        return ()
    par, nbytes = config.parallelism, tokens_of(config) * config.precision.nbytes
    forward, backward = Placement.FORWARD, Placement.BACKWARD
    if par.context_comm is ContextComm.ALL_GATHER:
        whole = nbytes * par.cp
        return tuple(
            _use(config, collective, whole * width, placement)
            for collective, placement in (
                (Collective.ALL_GATHER, forward),
                (Collective.ALL_GATHER, backward),
                (Collective.REDUCE_SCATTER, backward),
            )
            for width in (key_width, value_width)
        )
    uses: list[CollectiveUse] = []
    if par.exchanged_cp > 1:
        widths = (query_width, key_width, value_width, value_width * query_width // key_width)
        uses += [
            _use(config, Collective.ALL_TO_ALL, nbytes * width, placement)
            for placement in (forward, backward)
            for width in widths
        ]
    if rounds := par.cp // par.exchanged_cp - 1:
        both = nbytes * (key_width + value_width)
        send = group_call(config, Collective.SEND, GroupRole.CP, both)
        use = replace(transfer(send, forward, OperatorKind.CORE_ATTENTION), count=rounds)
        uses += [use, replace(use, placement=backward, count=2 * rounds)]
    return tuple(uses)


def _use(
    config: RunConfig, collective: Collective, nbytes: int, placement: Placement
) -> CollectiveUse:
    call = group_call(config, collective, GroupRole.CP, nbytes)
    par = config.parallelism
    if collective is Collective.ALL_TO_ALL and par.exchanged_cp < par.cp:
        ranks = group(par, GroupRole.CP, 0)[: par.exchanged_cp]
        nodes = len({rank // par.ranks_per_node for rank in ranks}) if par.ranks_per_node else 1
        call = replace(call, num_ranks=len(ranks), num_nodes=nodes)
    return transfer(call, placement)
