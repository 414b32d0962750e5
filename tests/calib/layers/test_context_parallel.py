"""Attention over context-parallel ranks: work and bytes by closed form.

The forms are those of TransformerEngine's three ways; no CPU runs it, so there is nothing recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from forerun.calib.layers.stage_work import collective_uses, stage_operators
from forerun.calib.workload.collectives import Collective, GroupRole, Placement
from forerun.calib.workload.config import ContextComm, Recompute, RunConfig
from forerun.calib.workload.operators import Operator, OperatorKind

Layout = Callable[..., RunConfig]
LAYERS, HEADS, CHANNELS, SEQ, MICRO = 4, 4, 16, 32, 2
TOKEN_NBYTES = HEADS * CHANNELS * 4


def causal_flop(operators: Iterable[tuple[Operator, int]]) -> int:
    total = 0
    for operator, count in operators:
        if operator.kind is OperatorKind.CORE_ATTENTION:
            micro, heads, _, seq, channels = operator.shape
            total += count * micro * heads * seq**2 * channels
    return total


def moved(config: RunConfig, placement: Placement) -> dict[Collective, int]:
    """Bytes of one micro-batch over cp in all layers."""
    out: dict[Collective, int] = {}
    for use in collective_uses(config, stage=0):
        if use.call.role is GroupRole.CP and use.placement is placement:
            kind = use.call.collective
            out[kind] = out.get(kind, 0) + use.count * use.call.nbytes
    return out


@pytest.mark.parametrize("comm", ContextComm)
@pytest.mark.parametrize("cp", [2, 4])
def test_the_work_of_attention_is_split_evenly(layout: Layout, comm: ContextComm, cp: int) -> None:
    whole = causal_flop(stage_operators(layout(), 0).forward)
    split = layout(par={"cp": cp, "context_comm": comm, "context_inner": 2})
    assert causal_flop(stage_operators(split, 0).forward) * cp == whole


def test_a_ring_carries_keys_and_values_and_their_gradients_with_them(layout: Layout) -> None:
    config = layout(par={"cp": 4, "context_comm": ContextComm.P2P})
    keys_and_values = 2 * MICRO * SEQ // 4 * TOKEN_NBYTES
    once = LAYERS * 3 * keys_and_values
    assert moved(config, Placement.FORWARD) == {Collective.SEND: once}
    assert moved(config, Placement.BACKWARD) == {Collective.SEND: 2 * once}
    uses = [u for u in collective_uses(config, stage=0) if u.call.role is GroupRole.CP]
    assert {u.overlaps_with for u in uses} == {OperatorKind.CORE_ATTENTION}


def test_all_to_all_moves_queries_keys_values_and_output(layout: Layout) -> None:
    config = layout(par={"cp": 2, "context_comm": ContextComm.ALL_TO_ALL})
    each = MICRO * SEQ // 2 * TOKEN_NBYTES
    for placement in (Placement.FORWARD, Placement.BACKWARD):
        assert moved(config, placement) == {Collective.ALL_TO_ALL: LAYERS * 4 * each}


def test_neighbours_exchange_heads_and_groups_of_them_form_a_ring(layout: Layout) -> None:
    par = {"cp": 4, "context_comm": ContextComm.HIERARCHICAL, "ranks_per_node": 2}
    config = layout(par=par | {"context_inner": 2})
    each = MICRO * SEQ // 4 * TOKEN_NBYTES
    ring = LAYERS * 2 * each
    exchanged = {Collective.ALL_TO_ALL: LAYERS * 4 * each}
    assert moved(config, Placement.FORWARD) == exchanged | {Collective.SEND: ring}
    assert moved(config, Placement.BACKWARD) == exchanged | {Collective.SEND: 2 * ring}
    calls = {u.call for u in collective_uses(config, stage=0) if u.call.role is GroupRole.CP}
    reach = {(call.collective, call.num_ranks, call.num_nodes) for call in calls}
    assert reach == {(Collective.ALL_TO_ALL, 2, 1), (Collective.SEND, 4, 2)}


@pytest.mark.parametrize(("inner", "plain"), [(1, ContextComm.P2P), (4, ContextComm.ALL_TO_ALL)])
def test_the_ends_of_the_hierarchy_are_the_plain_ways(
    layout: Layout, inner: int, plain: ContextComm
) -> None:
    par = {"cp": 4, "context_comm": ContextComm.HIERARCHICAL, "context_inner": inner}
    ours, other = layout(par=par), layout(par={"cp": 4, "context_comm": plain})
    assert collective_uses(ours, stage=0) == collective_uses(other, stage=0)
    assert stage_operators(ours, 0) == stage_operators(other, 0)


def test_gathered_keys_and_values_are_whole_and_gathered_twice(layout: Layout) -> None:
    config = layout(par={"cp": 2, "context_comm": ContextComm.ALL_GATHER})
    whole = LAYERS * 2 * MICRO * SEQ * TOKEN_NBYTES
    assert moved(config, Placement.FORWARD) == {Collective.ALL_GATHER: whole}
    assert moved(config, Placement.BACKWARD) == {
        Collective.ALL_GATHER: whole,
        Collective.REDUCE_SCATTER: whole,
    }


def test_recomputed_attention_sends_again(layout: Layout) -> None:
    config = layout(par={"cp": 2}, recompute=Recompute.SELECTIVE)
    assert moved(config, Placement.RECOMPUTE) == moved(config, Placement.FORWARD)
