"""Collectives at the process group, over a real gloo group of one rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from forerun.calib.marks._attribution import Attribution
from forerun.calib.records.record_kinds import FORWARD, CollectiveRecord
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.hooks.process.guard import Guard
from forerun.hooks.sensors.process_groups import PAYLOADS, ProcessGroupHooks, role_of
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Hooked:
    """Hooks on a step, and its records afterwards."""

    def __init__(self) -> None:
        self.guard = Guard()
        self.recorder = Recorder(HostStopwatch())
        self.hooks = ProcessGroupHooks(self.recorder, self.guard)
        self.records: list[CollectiveRecord] = []

    def __enter__(self) -> Hooked:
        self.hooks.install()
        self.recorder.open(StepLog(step=0, window=0, sites=()))
        return self

    def __exit__(self, *_: object) -> None:
        log = self.recorder.close()
        self.hooks.remove()
        records = Attribution(log).records()
        self.records = [r for r in records if isinstance(r, CollectiveRecord)]
        assert self.guard.num_faults == 0


def seen(records: list[CollectiveRecord]) -> list[tuple[Collective, int, int]]:
    return [(r.collective, r.nbytes, r.sequence) for r in records]


def test_what_another_thread_calls_is_not_of_the_step(group: dist.ProcessGroup) -> None:
    with Hooked() as step:
        other = Thread(target=lambda: dist.all_reduce(torch.ones(3), async_op=True).wait())
        other.start()
        dist.all_reduce(torch.ones(10))
        other.join()
    assert seen(step.records) == [(Collective.ALL_REDUCE, 40, 0)]


def test_what_a_backward_pass_calls_is_of_the_step(group: dist.ProcessGroup) -> None:
    """On a device that pass has a thread of its own; here another one stands for it."""
    value = torch.ones(10, requires_grad=True)
    value.register_hook(lambda gradient: dist.all_reduce(gradient.clone()))
    with Hooked() as step:
        engine = Thread(target=lambda: value.sum().backward())
        engine.start()
        engine.join()
    assert seen(step.records) == [(Collective.ALL_REDUCE, 40, 0)]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_bytes_are_those_of_the_whole_groups_buffer(group: dist.ProcessGroup) -> None:
    ten, out = torch.ones(10), torch.zeros(10)
    with Hooked() as step:
        dist.all_reduce(ten)
        dist.broadcast(ten, src=0)
        dist.all_gather([out], ten)
        dist.all_gather_into_tensor(out, ten)
        dist.reduce_scatter_tensor(out, ten)
        dist.all_to_all_single(out, ten)
        dist.barrier()
    assert seen(step.records) == [
        (Collective.ALL_REDUCE, 40, 0),
        (Collective.BROADCAST, 40, 0),
        (Collective.ALL_GATHER, 40, 0),
        (Collective.ALL_GATHER, 40, 1),
        (Collective.REDUCE_SCATTER, 40, 0),
        (Collective.ALL_TO_ALL, 40, 0),
        (Collective.OTHER, 0, 0),
    ]
    assert {(r.role, r.ranks, r.peer) for r in step.records} == {(GroupRole.WORLD, (0,), -1)}
    assert torch.equal(out, torch.ones(10))


def test_an_uneven_exchange_counts_the_larger_side() -> None:
    exchange = PAYLOADS["alltoall_base"]
    few, many = torch.ones(3), torch.ones(10)
    assert exchange.nbytes((many, few)) == exchange.nbytes((few, many)) == 40
    assert PAYLOADS["alltoall"].nbytes(([few, few], [many])) == 40


class CustomTensor(torch.Tensor):
    """A tensor of the user's own class, which answers for its size."""

    def numel(self) -> int:
        raise AssertionError


def test_a_tensor_of_an_own_class_is_a_call_of_unknown_size(group: dist.ProcessGroup) -> None:
    """Its time counts, and no size is made up: a sum of 0 bytes would be a measured latency."""
    custom = torch.ones(10).as_subclass(CustomTensor)
    with Hooked() as step:
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(custom)
        dist.all_reduce(torch.ones(5))
    assert seen(step.records) == [
        (Collective.ALL_REDUCE, 40, 0),
        (Collective.OTHER, 0, 0),
        (Collective.ALL_REDUCE, 20, 1),
    ]


def test_coalesced_calls_are_one_record_with_their_sum(group: dist.ProcessGroup) -> None:
    tensors = [torch.ones(4), torch.ones(6)]
    with Hooked() as step, dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    with Hooked() as second:
        pass
    manager.wait()
    assert seen(step.records) == [(Collective.ALL_REDUCE, 40, 0)]
    assert second.records == []


def test_a_synchronous_call_is_told_from_an_asynchronous_one(group: dist.ProcessGroup) -> None:
    with Hooked() as step:
        dist.all_reduce(torch.ones(2))
        work = dist.all_reduce(torch.ones(2), async_op=True)
        torch.ones(100).sum()
        dist.all_reduce(torch.ones(2))
        work.wait()
    assert [r.is_async for r in step.records] == [False, True, False]
    assert all(0 < r.exposed_ns <= r.duration_ns for r in step.records)
    assert all(not r.is_bound for r in step.records if not r.is_async)


def test_work_of_an_earlier_step_is_no_record_of_this_one(group: dist.ProcessGroup) -> None:
    work = dist.all_reduce(torch.ones(2), async_op=True)
    with Hooked() as step:
        work.wait()
    assert step.records == []


def test_the_roles_are_read_from_megatrons_descriptions(group: dist.ProcessGroup) -> None:
    tensor_parallel = dist.new_group([0], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    with Hooked() as step:
        dist.all_reduce(torch.ones(1), group=tensor_parallel)
        dist.all_reduce(torch.ones(1))
    assert [r.role for r in step.records] == [GroupRole.TP, GroupRole.WORLD]
    assert step.records[0].group.startswith("TENSOR_MODEL_PARALLEL_GROUP#")
    assert [r.sequence for r in step.records] == [0, 0]


def test_the_groups_of_experts_are_known_and_a_strange_group_is_other() -> None:
    assert role_of("EXPERT_MODEL_PARALLEL_GROUP") is GroupRole.EP
    assert role_of("EXPERT_TENSOR_PARALLEL_GROUP") is GroupRole.EXPERT_TP
    assert role_of("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP") is GroupRole.EXPERT_TP_EP
    assert role_of("EXPERT_DATA_PARALLEL_GROUP") is GroupRole.EXPERT_DP
    assert role_of("TENSOR_AND_CONTEXT_PARALLEL_GROUP") is GroupRole.OTHER


def test_a_wrong_call_raises_what_it_raised_before(group: dist.ProcessGroup) -> None:
    def message() -> str:
        with pytest.raises((TypeError, RuntimeError, ValueError)) as caught:
            group.allreduce("not a tensor")
        return str(caught.value).splitlines()[0]

    plain = message()
    with Hooked():
        assert message() == plain


def test_a_fault_of_ours_leaves_the_collective_alone(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = ProcessGroupHooks(Recorder(HostStopwatch()), guard := Guard())
    hooks._recorder.open(StepLog(step=0, window=0, sites=()))
    monkeypatch.setattr("forerun.hooks.sensors.process_groups._describe", lambda group: 1 / 0)
    hooks.install()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    hooks.remove()
    assert guard.num_faults == 1 and tensor.tolist() == [1, 1, 1]


def test_each_name_has_a_wrapper_of_its_own_and_gets_its_original_back() -> None:
    before = dict(vars(ProcessGroup))
    hooks = ProcessGroupHooks(Recorder(HostStopwatch()), Guard())
    hooks.install()
    wrappers = [vars(ProcessGroup)[name] for name in PAYLOADS if name in vars(ProcessGroup)]
    assert len({id(w) for w in wrappers}) == len(wrappers) > 10
    hooks.remove()
    assert dict(vars(ProcessGroup)) == before


def test_each_method_that_returns_work_is_hooked() -> None:
    """The installed torch says which; the end of a batch of calls is hooked apart."""
    methods = {
        name
        for name, method in vars(ProcessGroup).items()
        if re.search(r"-> .*\bWork$", method.__doc__ or "", re.MULTILINE)
    }
    assert methods > {"allreduce", "send"}
    assert methods - PAYLOADS.keys() <= {"_end_coalescing", "reconfigure"}


def test_a_group_that_torch_does_not_list_is_named_and_is_no_fault(
    group: dist.ProcessGroup,
) -> None:
    """As libraries make them that keep their groups to themselves."""
    store = dist.HashStore()
    unlisted = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1)
    unlisted._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    with Hooked() as step:
        for _ in range(4):
            unlisted.allreduce([torch.ones(3)]).wait()
        dist.all_reduce(torch.ones(10))
    assert seen(step.records) == [(Collective.ALL_REDUCE, 40, 0)]
    assert step.hooks.remarks == {
        "collectives of a group that torch.distributed does not list: unseen"
    }


class PythonGroup(dist.ProcessGroup):
    """A group with calls in Python, which pass by those of torch's class."""

    def allreduce(self, *_: object) -> dist.Work:
        return dist._Work()

    def getBackendName(self) -> str:
        return "own"


def test_groups_that_are_not_torchs_own_are_named(group: dist.ProcessGroup) -> None:
    name = "own_calls"
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            name, lambda store, rank, size, _: PythonGroup(rank, size), devices="cpu"
        )
    with Hooked() as step:
        assert step.hooks.remarks == set()
    group = dist.new_group([0], backend=name)
    with Hooked() as step:
        assert group.allreduce([torch.ones(3)]) is not None
    (remark,) = step.hooks.remarks
    assert remark == f"collectives of {__name__}.PythonGroup: own calls, waits unseen"


@pytest.mark.parametrize("counts_all", [False, True])
def test_a_log_without_space_lets_calls_outside_passes_by_and_counts_those_inside(
    group: dist.ProcessGroup, counts_all: bool
) -> None:
    recorder, guard = Recorder(HostStopwatch()), Guard()
    hooks = ProcessGroupHooks(recorder, guard)
    hooks.install()
    log = recorder.open(StepLog(step=0, window=0, sites=(), max_marks=40, counts_all=counts_all))
    value = torch.ones(1)
    for _ in range(100):
        dist.all_reduce(value)
    assert log.is_full != counts_all and log.num_free_marks == 0
    known = log.num_calls[0]
    assert known == 100 if counts_all else 10 <= known <= 11
    recorder.begin_phase(FORWARD)
    for _ in range(100):
        dist.all_reduce(value)
    assert log.num_pass_calls == [100] and log.num_calls == [known + 100]
    recorder.end_phase(FORWARD)
    dist.all_reduce(value)
    assert log.num_calls == [known + 100 + counts_all]
    recorder.close()
    hooks.remove()
    records = [r for r in Attribution(log).records() if isinstance(r, CollectiveRecord)]
    assert len(records) == 10 and all(r.stands_for == 1.0 for r in records)
    assert guard.num_faults == 0
