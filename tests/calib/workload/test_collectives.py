from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from stage_tensors import parameters

from forerun.calib.layers.buckets import buckets
from forerun.calib.layers.stage_work import collective_uses, step_collectives
from forerun.calib.workload.collectives import Collective, CollectiveUse, GroupRole, Placement
from forerun.calib.workload.config import Precision, Recompute, RunConfig

Layout = Callable[..., RunConfig]


def number(config: RunConfig, stage: int, role: GroupRole, kind: Collective) -> int:
    calls = step_collectives(config, stage=stage)
    return sum(n for call, n in calls if call.role is role and call.collective is kind)


def placed(config: RunConfig, place: Placement, stage: int = 0) -> list[CollectiveUse]:
    return [use for use in collective_uses(config, stage=stage) if use.placement is place]


def test_a_single_rank_sends_nothing(layout: Layout) -> None:
    assert collective_uses(layout(), stage=0) == ()


def test_tensor_parallel_reductions_follow_the_closed_form(layout: Layout) -> None:
    """m (4 L / p + 1) on the first stage; m (4 L / p + 4) on the last: three sums and a dgrad."""
    config = layout(tp=2, pp=2, dp=2)
    m = config.num_microbatches
    assert number(config, 0, GroupRole.TP, Collective.ALL_REDUCE) == m * (4 * 2 + 1)
    assert number(config, 1, GroupRole.TP, Collective.ALL_REDUCE) == m * (4 * 2 + 4)


def test_full_recompute_repeats_the_forward_reductions(layout: Layout) -> None:
    plain, full = layout(tp=2), layout(tp=2, recompute=Recompute.FULL)
    more = number(full, 0, GroupRole.TP, Collective.ALL_REDUCE)
    more -= number(plain, 0, GroupRole.TP, Collective.ALL_REDUCE)
    assert more == plain.num_microbatches * 2 * 4


def test_sequence_parallelism_puts_two_halves_in_place_of_each_reduction(layout: Layout) -> None:
    """Four collectives forward and six backward per layer, each over the whole sequence."""
    config = layout(tp=2, par={"is_sequence_parallel": True})
    kinds = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    whole = 2 * 32 * 64 * 4
    counts = {
        (place, kind): sum(
            u.count
            for u in placed(config, place)
            if u.call.collective is kind and u.call.nbytes == whole
        )
        for place in (Placement.FORWARD, Placement.BACKWARD)
        for kind in kinds
    }
    head, embedding = 1, 1
    assert counts == {
        (Placement.FORWARD, Collective.ALL_GATHER): 2 * 4 + head,
        (Placement.FORWARD, Collective.REDUCE_SCATTER): 2 * 4,
        (Placement.BACKWARD, Collective.ALL_GATHER): 4 * 4 + head + embedding,
        (Placement.BACKWARD, Collective.REDUCE_SCATTER): 2 * 4 + head,
    }


def test_pipeline_messages_are_two_per_microbatch_and_boundary(layout: Layout) -> None:
    config = layout(pp=4)
    for kind in (Collective.SEND, Collective.RECV):
        total = sum(number(config, s, GroupRole.PP, kind) for s in range(4))
        assert total == 3 * 2 * config.num_microbatches


def test_the_gradients_of_a_plain_reduction_are_all_of_them_in_fp32(layout: Layout) -> None:
    config = layout(dp=4, precision=Precision.BF16)
    (use,) = placed(config, Placement.GRAD_REDUCE)
    assert use.call.nbytes == 4 * parameters(config, 0)
    assert use.call.collective is Collective.ALL_REDUCE


def test_the_distributed_optimizer_gathers_what_it_scattered(layout: Layout) -> None:
    config = layout(dp=4, precision=Precision.BF16, par={"is_optimizer_distributed": True})
    (scatter,) = placed(config, Placement.GRAD_REDUCE)
    (gather,) = placed(config, Placement.PARAM_GATHER)
    assert scatter.call.nbytes == 2 * gather.call.nbytes
    assert scatter.call.nbytes % (4 * math.lcm(4, 128)) == 0


def test_overlap_cuts_buckets_at_forty_million_on_the_first_stage_alone(layout: Layout) -> None:
    model = {"hidden_size": 2048, "ffn_hidden_size": 8192, "kv_channels": 512}
    config = layout(dp=2, pp=2, par={"overlaps_grad_reduce": True}, model=model)
    first, last = ([b.numel for b in buckets(config, c)] for c in (0, 1))
    assert sum(first) == parameters(config, 0)
    assert len(first) > 1
    assert min(first[:-1]) >= 40_000_000
    assert last == [parameters(config, 1)]


@pytest.mark.parametrize("stage", [0, 3])
def test_tied_embeddings_are_summed_over_both_ends(layout: Layout, stage: int) -> None:
    config = layout(pp=4, tp=2)
    assert number(config, stage, GroupRole.EMBEDDING, Collective.ALL_REDUCE) == 1
    assert number(config, 1, GroupRole.EMBEDDING, Collective.ALL_REDUCE) == 0
    untied = layout(pp=4, tp=2, model={"is_tied": False})
    assert number(untied, stage, GroupRole.EMBEDDING, Collective.ALL_REDUCE) == 0
