"""Groups that carry probes, and which of their calls NCCL has connected for the run itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.config import Parallelism
from forerun.hooks.probing._probe_transfers import TransferBench, find_carrier
from forerun.hooks.process.guard import Guard
from forerun.hooks.sensors.process_groups import GroupRoles, ProcessGroupHooks
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch

LAYOUT = Parallelism(tp=2, dp=2, pp=2)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


def bench(collective: Collective, role: GroupRole, ranks: tuple[int, ...]) -> TransferBench:
    carrier = find_carrier(role, ranks, GroupRoles(None, LAYOUT))
    assert carrier is not None
    return TransferBench(collective, 64, carrier, dtype=torch.float32, device=CPU)


def test_groups_are_known_by_their_ranks_where_nothing_names_them() -> None:
    tp, dp, pp = dist.new_group([4, 5]), dist.new_group([5, 7]), dist.new_group([1, 5])
    roles = GroupRoles(None, LAYOUT)
    for role, ranks, group in (
        (GroupRole.TP, (4, 5), tp),
        (GroupRole.DP, (5, 7), dp),
        # With two stages the embeddings' group has the same ranks.
        (GroupRole.PP, (1, 5), pp),
    ):
        carrier = find_carrier(role, ranks, roles)
        assert carrier is not None and carrier.group is group
    assert find_carrier(GroupRole.DP, (4, 5, 6), roles) is None


def test_a_name_says_more_than_ranks() -> None:
    user_group = dist.new_group([4, 5])
    named = dist.new_group([4, 5], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    carrier = find_carrier(GroupRole.TP, (4, 5), GroupRoles(None, LAYOUT))
    assert carrier is not None and carrier.group is named
    roles = GroupRoles({user_group.group_name: GroupRole.CP}, LAYOUT)
    carrier = find_carrier(GroupRole.CP, (4, 5), roles)
    assert carrier is not None and carrier.group is user_group


@pytest.fixture
def step() -> Iterator[None]:
    recorder, guard = Recorder(HostStopwatch()), Guard()
    hooks = ProcessGroupHooks(recorder, guard)
    hooks.install()
    recorder.open(StepLog(step=0, window=0, sites=()))
    yield
    recorder.close()
    hooks.remove()
    assert guard.num_faults == 0


@pytest.mark.usefixtures("step")
def test_what_a_hooked_step_calls_is_connected() -> None:
    group = dist.new_group([5, 7], group_desc="DATA_PARALLEL_GROUP")
    dist.all_reduce(torch.ones(4), group=group)
    assert bench(Collective.ALL_REDUCE, GroupRole.DP, (5, 7)).is_connected
    assert not bench(Collective.ALL_GATHER, GroupRole.DP, (5, 7)).is_connected
    group._start_coalescing(CPU)
    dist.send(torch.ones(4), 7, group=group)
    assert not bench(Collective.SEND, GroupRole.DP, (5, 7)).is_connected
    dist.recv(torch.ones(4), 7, group=group)
    group._end_coalescing(CPU)
    assert bench(Collective.SEND, GroupRole.DP, (5, 7)).is_connected


@pytest.mark.usefixtures("step")
def test_messages_that_are_not_batched_have_a_communicator_of_their_own() -> None:
    group = dist.new_group([5, 7], group_desc="DATA_PARALLEL_GROUP")
    dist.send(torch.ones(4), 7, group=group)
    dist.recv(torch.ones(4), 7, group=group)
    assert not bench(Collective.SEND, GroupRole.DP, (5, 7)).is_connected
