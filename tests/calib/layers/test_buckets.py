from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stage_tensors import parameter_tensors, parameters

from forerun.calib.layers.buckets import buckets, num_shards
from forerun.calib.layers.stage_work import collective_uses
from forerun.calib.workload.collectives import Collective, CollectiveUse, GroupRole, Placement
from forerun.calib.workload.config import Fp8Recipe, Precision, RunConfig

Layout = Callable[..., RunConfig]
MODEL = {"num_layers": 6, "hidden_size": 60, "ffn_hidden_size": 100, "vocab_size": 260}


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    dp=st.sampled_from([1, 2, 3, 8]),
    pp=st.sampled_from([1, 2, 3]),
    is_tied=st.booleans(),
    is_distributed=st.booleans(),
    limit=st.integers(1, 60_000),
)
def test_buckets_hold_every_parameter_and_close_at_the_limit(
    layout: Layout, dp: int, pp: int, is_tied: bool, is_distributed: bool, limit: int
) -> None:
    """Walks tensor by tensor, where the code takes layers whole."""
    par = {
        "is_optimizer_distributed": is_distributed,
        "overlaps_grad_reduce": True,
        "bucket_numel": limit,
    }
    config = layout(dp=dp, pp=pp, samples=48, model={**MODEL, "is_tied": is_tied}, par=par)
    for chunk in range(pp):
        sizes = [bucket.numel for bucket in buckets(config, chunk)]
        tensors = parameter_tensors(config, chunk)[::-1]
        edge = math.lcm(num_shards(config.parallelism), 128) if is_distributed else 1
        start = 64 if is_distributed else 1
        assert all(size % edge == 0 for size in sizes)
        walked: list[int] = []
        bucket_numel = 0
        for tensor in tensors:
            bucket_numel = round_up(bucket_numel, start)
            is_alone = is_distributed and tensor.is_shared_embedding
            if is_alone and bucket_numel:
                walked.append(round_up(bucket_numel, edge))
                bucket_numel = 0
            bucket_numel += tensor.numel
            if is_alone or (chunk == 0 and bucket_numel >= limit):
                walked.append(round_up(bucket_numel, edge))
                bucket_numel = 0
        assert sizes == [*walked, *([round_up(bucket_numel, edge)] if bucket_numel else [])]


def test_instances_scatter_within_and_reduce_shards_across(layout: Layout) -> None:
    par = {"is_optimizer_distributed": True, "num_optimizer_instances": 2}
    scatter, reduce, gather = step_uses(layout(dp=8, par=par))
    assert (scatter.call.collective, scatter.call.num_ranks) == (Collective.REDUCE_SCATTER, 4)
    assert (reduce.call.role, reduce.call.num_ranks) == (GroupRole.DP_INSTANCES, 2)
    assert reduce.call.nbytes * 4 == scatter.call.nbytes
    assert gather.call.num_ranks == 4


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_groups_of_a_node_gather_inside_it_and_send_no_more_between_nodes(
    layout: Layout, copies: int
) -> None:
    """Bytes that leave a node of 4 ranks in a step: of a scatter or a gather over all
    (n - 1) / n of the buffer, and twice that of a sum, as every ring has them; where the optimizer
    is sharded over the ranks of one node, the shards of all are summed between nodes, and nothing
    is gathered from another.
    """
    par = {"is_optimizer_distributed": True, "ranks_per_node": 4}
    config = layout(dp=16, samples=32, par={**par, "num_optimizer_instances": copies})
    buffer = round_up(parameters(config, 0), 128 * 16) * 4
    sent = dict.fromkeys(("between", "gathered"), 0.0)
    for use in step_uses(config):
        call = use.call
        passes = 2 if call.collective is Collective.ALL_REDUCE else 1
        # Each rank of a node is in a group of its own where instances are joined.
        groups = 4 if call.role is GroupRole.DP_INSTANCES else 1
        crossing = passes * (call.num_nodes - 1) / call.num_nodes * call.nbytes * groups
        sent["between"] += crossing
        sent["gathered"] += crossing if call.collective is Collective.ALL_GATHER else 0.0
    whole = 2 * (4 - 1) / 4 * buffer
    assert sent["between"] == pytest.approx(whole, rel=0.01)
    assert (sent["gathered"] == 0) is (copies == 4)


def test_weights_in_8_bits_travel_in_buckets_of_their_own(layout: Layout) -> None:
    """Linear weights of layers at one byte; embedding, norms and biases at two."""
    run: dict[str, Any] = {
        "precision": Precision.BF16,
        "fp8": Fp8Recipe.TENSORWISE,
        "keeps_fp8_params": True,
        "par": {"is_optimizer_distributed": True},
    }
    config = layout(dp=2, **run)
    gathers = [u.call.nbytes for u in step_uses(config) if u.placement is Placement.PARAM_GATHER]
    weights = 4 * (4 * 64 * 64 + 2 * 64 * 128)
    others = parameters(config, 0) - weights
    assert sorted(gathers) == sorted([weights, 2 * round_up(others, 128)])
    blocks = layout(dp=2, **{**run, "fp8": Fp8Recipe.MXFP8})
    gathers = [u.call.nbytes for u in step_uses(blocks) if u.placement is Placement.PARAM_GATHER]
    assert max(gathers) == 2 * weights


def test_quantized_inputs_are_gathered_quantized(layout: Layout) -> None:
    par = {"is_sequence_parallel": True}
    plain = layout(tp=2, precision=Precision.BF16, par=par)
    quantized = layout(tp=2, precision=Precision.BF16, par=par, fp8=Fp8Recipe.MXFP8)
    whole = 2 * 32 * 64 * 2

    def gathered(config: RunConfig) -> set[int]:
        uses = collective_uses(config, stage=0)
        return {u.call.nbytes for u in uses if u.call.collective is Collective.ALL_GATHER}

    assert gathered(plain) == {whole}
    assert gathered(quantized) == {whole, whole // 2 * 33 // 32}


def step_uses(config: RunConfig) -> list[CollectiveUse]:
    placements = (Placement.GRAD_REDUCE, Placement.PARAM_GATHER)
    return [use for use in collective_uses(config, stage=0) if use.placement in placements]


def round_up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
