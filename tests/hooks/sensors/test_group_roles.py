"""M10: groups without a description have the role that their ranks have in the layout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from forerun.calib.marks._attribution import Attribution
from forerun.calib.records.record_kinds import CollectiveRecord
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.config import Parallelism
from forerun.hooks.process.guard import Guard
from forerun.hooks.recording.flight_recorder import known_groups
from forerun.hooks.sensors.process_groups import (
    GroupRoles,
    ProcessGroupHooks,
    role_by_ranks,
    role_of,
)
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch

LAYOUT = Parallelism(tp=2, dp=2, pp=2)


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


def roles_seen(roles: GroupRoles, *groups: dist.ProcessGroup) -> list[GroupRole]:
    recorder, guard = Recorder(HostStopwatch()), Guard()
    hooks = ProcessGroupHooks(recorder, guard, roles)
    hooks.install()
    log = recorder.open(StepLog(step=0, window=0, sites=()))
    for group in groups:
        dist.all_reduce(torch.ones(4), group=group)
    recorder.close()
    hooks.remove()
    assert guard.num_faults == 0
    collective_records = [r for r in Attribution(log).records() if isinstance(r, CollectiveRecord)]
    return [record.role for record in collective_records]


@pytest.mark.usefixtures("world")
def test_m10_groups_that_are_made_without_a_description_are_known_by_their_ranks() -> None:
    """As Bridge makes them for Megatron; all of them were the whole world's before."""
    tp, dp, pp = dist.new_group([4, 5]), dist.new_group([5, 7]), dist.new_group([1, 5])
    roles = GroupRoles(None, LAYOUT)
    # With two stages the embeddings' group has the pipeline's ranks, and only it reduces.
    expected = [GroupRole.TP, GroupRole.DP, GroupRole.EMBEDDING]
    assert roles_seen(roles, tp, dp, pp) == expected
    assert roles.of(pp, (1, 5), Collective.SEND) is GroupRole.PP
    named = {group.ranks: group.role for group in known_groups(roles).values()}
    assert named[4, 5] is GroupRole.TP and named[5, 7] is GroupRole.DP
    assert named[tuple(range(8))] is GroupRole.WORLD
    assert roles_seen(GroupRoles(), dp) == [GroupRole.OTHER]


@pytest.mark.usefixtures("world")
def test_m10_beside_groups_with_names_one_without_is_the_users() -> None:
    user_group = dist.new_group([4, 5])
    dist.new_group([4, 5], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    assert GroupRoles(None, LAYOUT).of(user_group, (4, 5)) is GroupRole.OTHER
    everyone = dist.new_group(list(range(8)))
    assert GroupRoles(None, LAYOUT).of(everyone, tuple(range(8))) is GroupRole.WORLD
    roles = GroupRoles({user_group.group_name: GroupRole.CP}, LAYOUT)
    assert roles.of(user_group, (4, 5)) is GroupRole.CP


def test_m10_where_ranks_are_the_same_the_collective_tells_experts_from_data() -> None:
    layout = Parallelism(tp=1, dp=8, pp=1, ep=8)
    ranks = tuple(range(8))
    assert role_by_ranks(layout, 3, ranks, Collective.ALL_TO_ALL) is GroupRole.EP
    assert role_by_ranks(layout, 3, ranks, Collective.REDUCE_SCATTER) is GroupRole.DP
    assert role_by_ranks(layout, 3, (0, 3)) is GroupRole.OTHER
    assert role_by_ranks(layout, 9, (8, 9)) is GroupRole.OTHER


@pytest.mark.parametrize(
    ("description", "role"),
    [
        ("DATA_PARALLEL_GROUP_WITH_CP_AG", GroupRole.DP),
        ("DATA_PARALLEL_GROUP_WITH_GTP_REMAT", GroupRole.DP),
        ("DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", GroupRole.DP),
        ("EXPERT_DATA_PARALLEL_GROUP_AG", GroupRole.EXPERT_DP),
        ("EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", GroupRole.EXPERT_DP),
    ],
)
def test_m10_the_descriptions_of_newer_releases_are_known(
    description: str, role: GroupRole
) -> None:
    assert role_of(description) is role
