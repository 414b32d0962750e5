"""Traffic of ZeRO and FSDP by its published volumes (Rajbhandari et al. 2020, section 7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from stage_tensors import parameters

from forerun.calib.layers.blocks import BlockKind, block
from forerun.calib.layers.stage_work import collective_uses, step_collectives
from forerun.calib.workload.collectives import Collective, CollectiveUse, GroupRole, Placement
from forerun.calib.workload.config import Experts, Precision, Recompute, RunConfig, Sharding

Layout = Callable[..., RunConfig]
DATA = (GroupRole.DP, GroupRole.EXPERT_DP, GroupRole.DP_INSTANCES)


def sharded(layout: Layout, sharding: Sharding, *, dp: int = 4, **par: Any) -> RunConfig:
    chosen = {"is_optimizer_distributed": True, "sharding": sharding, **par}
    settings = {"precision": Precision.BF16, "reduces_grads_in_bf16": True, "samples": 8 * dp}
    return layout(dp=dp, par=chosen, **settings)


def sent_nbytes(config: RunConfig) -> dict[Collective, float]:
    """Return bytes of the gathered or scattered buffers of a step's data-parallel collectives."""
    out: dict[Collective, float] = {}
    for call, count in step_collectives(config, stage=0):
        if call.role in DATA:
            out[call.collective] = out.get(call.collective, 0) + call.nbytes * count
    return out


def data_uses(config: RunConfig) -> list[CollectiveUse]:
    return [use for use in collective_uses(config, stage=0) if use.call.role in DATA]


def test_each_stage_of_zero_carries_what_it_should(layout: Layout) -> None:
    """Stages 1 and 2 two volumes of the model, stage 3 three; deep ones for each micro-batch."""
    base = sharded(layout, Sharding.WEIGHTS)
    num, volume = base.num_microbatches, 2 * parameters(base, 0)
    assert num > 1
    first = sent_nbytes(sharded(layout, Sharding.OPTIMIZER))
    # The distributed optimizer pads its buckets.
    assert first == pytest.approx(
        {Collective.REDUCE_SCATTER: volume, Collective.ALL_GATHER: volume}, rel=0.01
    )
    second = sent_nbytes(sharded(layout, Sharding.GRADS))
    assert second[Collective.REDUCE_SCATTER] == num * volume
    assert second[Collective.ALL_GATHER] == pytest.approx(volume, rel=0.01)
    third = sent_nbytes(base)
    assert third[Collective.REDUCE_SCATTER] == num * volume
    # Twice but for what lies outside of the layers, which stays gathered.
    layers = 2 * base.model.num_layers * block(base, BlockKind.LAYER).numel.dense
    assert third[Collective.ALL_GATHER] == num * (volume + layers)


def test_weights_that_stay_are_gathered_once_and_whole_gradients_reduced_once(
    layout: Layout,
) -> None:
    resident = sharded(layout, Sharding.WEIGHTS, regathers_weights=False)
    volume = 2 * parameters(resident, 0)
    assert sent_nbytes(resident)[Collective.ALL_GATHER] == resident.num_microbatches * volume
    whole = sharded(layout, Sharding.WEIGHTS, keeps_grads_whole=True)
    assert sent_nbytes(whole)[Collective.REDUCE_SCATTER] == pytest.approx(volume, rel=0.01)
    places = {use.placement for use in data_uses(whole)}
    assert places == {Placement.FORWARD, Placement.BACKWARD, Placement.GRAD_REDUCE}


def test_hybrid_sharding_gathers_within_and_sums_shards_across(layout: Layout) -> None:
    config = sharded(layout, Sharding.WEIGHTS, dp=8, num_optimizer_instances=2)
    uses = data_uses(config)
    within = [use.call for use in uses if use.call.role is GroupRole.DP]
    across = [use.call for use in uses if use.call.role is GroupRole.DP_INSTANCES]
    assert {call.num_ranks for call in within} == {4} and {c.num_ranks for c in across} == {2}
    assert {call.collective for call in across} == {Collective.ALL_REDUCE}
    scattered = [c.nbytes for c in within if c.collective is Collective.REDUCE_SCATTER]
    assert [4 * call.nbytes for call in across] == scattered


def test_experts_are_sharded_among_their_own_replicas(llama: Layout) -> None:
    experts = Experts(num_experts=4, top_k=2, ffn_hidden_size=64)
    par = {"is_optimizer_distributed": True, "sharding": Sharding.WEIGHTS, "ep": 2}
    config = llama(model={"experts": experts}, dp=4, par=par)
    sizes = {use.call.role: use.call.num_ranks for use in data_uses(config)}
    assert sizes == {GroupRole.DP: 4, GroupRole.EXPERT_DP: 2}


def test_recomputed_layers_gather_no_third_time(layout: Layout) -> None:

    par = {"is_optimizer_distributed": True, "sharding": Sharding.WEIGHTS}
    plain, recomputed = (
        layout(dp=4, par=par, recompute=how) for how in (Recompute.NONE, Recompute.FULL)
    )
    assert sent_nbytes(plain) == sent_nbytes(recomputed)


def test_without_a_distributed_optimizer_nothing_is_sharded(layout: Layout) -> None:
    config = layout(dp=4, par={"sharding": Sharding.WEIGHTS})
    assert config.parallelism.sharded is Sharding.NONE
    assert {use.call.collective for use in data_uses(config)} == {Collective.ALL_REDUCE}
