"""Who records in large worlds: sizes, and that what is recorded can be told from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.workload.collectives import GroupRole
from forerun.calib.workload.parallelism import Parallelism
from forerun.calib.workload.ranks import group, position
from forerun.calib.workload.recording import (
    FILES_NBYTES,
    MAX_MEMBERS,
    SMALL_WORLD,
    SUMMARIES_NBYTES,
    RecordingDetail,
    recording_plan,
)

LAYOUTS = {
    "dense": Parallelism(tp=8, pp=16, dp=128),
    "pipeline before data": Parallelism(tp=8, pp=16, dp=128, is_pipeline_before_data=True),
    "context": Parallelism(tp=8, pp=16, cp=2, dp=64),
    "experts": Parallelism(tp=8, pp=16, dp=128, ep=64, etp=1),
    "many experts": Parallelism(pp=16, dp=1024, ep=256),
    "data alone": Parallelism(dp=16384),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@each_layout
def test_the_files_of_16384_ranks_have_264_mib_at_most(layout: Parallelism) -> None:
    plan = recording_plan(16384, layout)
    bounds = [plan.file_nbytes(rank) for rank in plan.recorders]
    assert all(bound is not None and bound > 16 << 10 for bound in bounds)
    assert sum(bound or 0 for bound in bounds) + SUMMARIES_NBYTES <= 264 << 20
    assert sum(bound or 0 for bound in bounds) > 0.99 * FILES_NBYTES
    assert len(plan.recorders) <= len(plan.replica) + MAX_MEMBERS


@each_layout
def test_one_whole_replica_records_beside_the_last_rank(layout: Parallelism) -> None:
    plan = recording_plan(16384, layout)
    places = [position(layout, rank) for rank in plan.replica]
    assert len(plan.replica) == layout.tp * layout.cp * layout.pp
    assert {place.stage for place in places} == set(range(layout.pp))
    assert {place.dp_rank for place in places} == {layout.dp - 1}
    assert plan.part(16383) is RecordingDetail.OPERATORS
    timed = [rank for rank in plan.replica if plan.part(rank) is RecordingDetail.OPERATORS]
    assert {position(layout, rank).stage for rank in timed} == set(range(layout.pp))
    assert len(timed) <= 2 * layout.pp


@each_layout
@pytest.mark.parametrize("role", [GroupRole.TP, GroupRole.CP, GroupRole.PP])
def test_groups_inside_the_replica_are_seen_whole(layout: Parallelism, role: GroupRole) -> None:
    plan = recording_plan(16384, layout)
    for rank in plan.replica:
        assert set(group(layout, role, rank)) <= plan.replica


def test_expert_groups_of_the_replica_are_seen_whole() -> None:
    layout = LAYOUTS["experts"]
    plan = recording_plan(16384, layout)
    for rank in plan.replica:
        assert set(group(layout, GroupRole.EXPERT_TP_EP, rank)) <= set(plan.recorders)
    assert {plan.part(rank) for rank in plan.recorders if rank not in plan.replica} == {
        RecordingDetail.GROUPS
    }


def test_where_not_all_expert_groups_fit_those_that_do_are_whole() -> None:
    layout = LAYOUTS["many experts"]
    plan = recording_plan(16384, layout)
    recorders = set(plan.recorders)
    groups = {group(layout, GroupRole.EXPERT_TP_EP, rank) for rank in plan.replica}
    whole = [ranks for ranks in groups if set(ranks) <= recorders]
    assert 1 <= len(whole) < len(groups)
    assert set(group(layout, GroupRole.EXPERT_TP_EP, 16383)) <= recorders


def test_the_data_parallel_group_of_the_last_rank_is_seen_whole_or_sampled() -> None:
    plan = recording_plan(16384, LAYOUTS["dense"])
    assert set(group(LAYOUTS["dense"], GroupRole.DP, 16383)) <= set(plan.recorders)
    plan = recording_plan(16384, LAYOUTS["data alone"])
    gaps = {b - a for a, b in zip(plan.recorders, plan.recorders[1:], strict=False)}
    assert len(plan.recorders) == 129 and gaps <= {127, 128}


@pytest.mark.parametrize("world_size", range(1, SMALL_WORLD + 1))
def test_in_a_small_world_everyone_records_everything_unbounded(world_size: int) -> None:
    plan = recording_plan(world_size, Parallelism(dp=world_size))
    assert plan.parts == dict.fromkeys(range(world_size), RecordingDetail.OPERATORS)
    assert plan.is_small and plan.file_nbytes(0) is None


@pytest.mark.parametrize("layout", [None, Parallelism(dp=4)])
def test_without_a_layout_that_fits_the_first_and_the_last_node_record(layout) -> None:
    assert recording_plan(12, layout).recorders == tuple(range(12))
    assert recording_plan(4096, layout).recorders == (*range(8), *range(4088, 4096))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 8), st.booleans())
def test_every_stage_and_no_foreign_rank(tp: int, pp: int, cp: int, dp: int, flip: bool) -> None:
    layout = Parallelism(tp=tp, pp=pp, cp=cp, dp=dp, is_pipeline_before_data=flip)
    plan = recording_plan(layout.num_ranks, layout)
    assert set(plan.recorders) <= set(range(layout.num_ranks))
    assert layout.num_ranks - 1 in plan.replica
    assert {position(layout, rank).stage for rank in plan.replica} == set(range(pp))
