"""The real flight recorder of a gloo group; durations, which only NCCL has, are planted in it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_timeline import capturing, installed
from torch._C import _distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from forerun.calib.marks._attribution import Attribution
from forerun.calib.marks.window_records import WindowRecords
from forerun.calib.records.record_kinds import CollectiveRecord, WindowRecord
from forerun.hooks.process.guard import Guard
from forerun.hooks.recording import flight_recorder
from forerun.hooks.recording.flight_recorder import (
    FlightRecorder,
    capture_safe_dump,
    find_dumps,
    find_exchange,
    prepare,
)
from forerun.hooks.sensors.process_groups import ProcessGroupHooks
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch

DURATION_MS = 0.125
TIMED = {"TORCH_NCCL_ENABLE_TIMING": "1"}


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def dump_with_durations(number: int) -> str:
    """The real dump, but the entries have durations, which grow with their number."""
    dump = find_dumps()["gloo"]
    assert dump is not None
    result = json.loads(dump())
    for entry in result["entries"][-number:]:
        entry["duration_ms"] = DURATION_MS
    return json.dumps(result)


def only(dump: Callable[[], str]) -> Callable[[Any], dict[str, Any]]:
    """Return a function that finds one recorder, with this dump."""
    return lambda known: {"gloo": dump}


def step(flight: FlightRecorder, number: int) -> StepLog:
    recorder = Recorder(HostStopwatch())
    hooks = ProcessGroupHooks(recorder, Guard())
    tensor = torch.ones(4)
    hooks.install()
    log = recorder.open(StepLog(step=number, window=0, sites=()))
    flight.begin_step()
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    for work in works:
        assert work is not None
        work.wait()
    dist.all_reduce(tensor)
    recorder.close()
    flight.end_step(number)
    hooks.remove()
    return log


def test_durations_reach_the_asynchronous_calls_of_their_step(group):
    flight = FlightRecorder(only(lambda: dump_with_durations(8)), environ=TIMED)
    dist.all_reduce(torch.ones(4))  # before the step: none of its calls
    logs = [step(flight, 3), step(flight, 6)]
    window = flight.close_window().read()
    for log in logs:
        records = [*window.amend(Attribution(log).records())]
        calls = [r for r in records if isinstance(r, CollectiveRecord)]
        assert [r.is_async for r in calls] == [True, True, True, False]
        assert [r.duration_ns for r in calls[:3]] == [125_000] * 3
        assert not any(r.is_bound for r in calls)
        assert calls[3].duration_ns != 125_000


@pytest.mark.parametrize("dump", [None, lambda: "{damaged duration_ms"])
def test_without_durations_the_records_stay_as_they_are(group, dump, caplog):
    flight = FlightRecorder(dump and only(dump), environ=TIMED)
    log = step(flight, 3)
    plain = [*Attribution(log).records()]
    assert [*flight.close_window().read().amend(iter(plain))] == plain
    assert bool(caplog.records) == (dump is not None)


@pytest.mark.parametrize(
    ("environ", "unseen", "is_expected"),
    [
        ({}, (), False),
        ({"TORCH_NCCL_ENABLE_TIMING": "0"}, (), False),
        ({"TORCH_NCCL_ENABLE_TIMING": "True"}, (), True),
        ({"TORCH_NCCL_DESYNC_DEBUG": "1"}, (), True),
        ({}, ("collectives of DDP",), True),
        ({}, ("something else",), False),
    ],
)
def test_it_is_dumped_only_where_it_can_add_something(group, environ, unseen, is_expected):
    dumps = []

    def dump() -> str:
        dumps.append(1)
        return dump_with_durations(1)

    flight = FlightRecorder(only(dump), unseen=unseen, environ=environ)
    log = step(flight, 3)
    assert [*flight.close_window().read().amend(Attribution(log).records())]
    assert bool(dumps) == is_expected


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_dump_from_another_thread_ends_no_capture(is_ours):
    """The device's own dump asks its events; as it is, that ends a capture in global mode."""
    with installed() as device:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        errors: list[RuntimeError] = []

        def dump() -> str:
            event.query()
            return "{}"

        def ask() -> None:
            safe_dump = capture_safe_dump(dump, device.device.exchange_mode) if is_ours else dump
            assert safe_dump is not None
            try:
                safe_dump()
            except RuntimeError as err:
                errors.append(err)

        captured = capturing("global")
        capture = captured.__enter__()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        if is_ours:
            captured.__exit__(None, None, None)
        else:
            with pytest.raises(RuntimeError, match="previous error during capture"):
                captured.__exit__(None, None, None)
        assert (capture.invalidated_by == "") == is_ours
        assert bool(errors) != is_ours


def test_where_the_mode_of_a_thread_cannot_be_changed_nothing_is_dumped():
    assert capture_safe_dump(lambda: "{}", None) is None


def test_the_mode_is_put_back_after_a_dump_that_fails():
    modes = [0]

    def exchange(mode: int) -> int:
        modes.append(mode)
        return modes[-2]

    def dump() -> str:
        raise RuntimeError("no recorder")

    dumped = capture_safe_dump(dump, exchange)
    assert dumped is not None
    with pytest.raises(RuntimeError):
        dumped()
    assert modes == [0, 2, 0]


class Runtime:
    """A runtime's library, whose calling thread is in mode 1."""

    def __init__(self, code: int) -> None:
        self.code, self.mode = code, 1

    def cudaThreadExchangeStreamCaptureMode(self, given: Any) -> int:
        given._obj.value, self.mode = self.mode, given._obj.value
        return self.code


def test_the_runtime_that_torch_was_built_for_is_only(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    libraries = {"libcudart.so.13": Runtime(0)}
    exchange = find_exchange(libraries.__getitem__)
    assert exchange is not None
    assert (exchange(2), exchange(1)) == (1, 2)
    libraries["libcudart.so.13"].code = 3
    with pytest.raises(RuntimeError, match="error 3"):
        exchange(2)


@pytest.mark.parametrize(("cuda", "hip"), [("12.8", None), (None, "6.2")])
def test_a_runtime_that_is_not_there_is_no_fault(monkeypatch, cuda, hip):
    def load(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert find_exchange(load) is None


def test_the_environment_is_prepared_where_the_user_said_nothing():
    environ: dict[str, str] = {}
    prepare(environ)
    assert environ == {"TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_FR_BUFFER_SIZE": "5000"}
    user_environ = {"TORCH_NCCL_ENABLE_TIMING": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "10"}
    prepared = dict(user_environ)
    prepare(prepared)
    assert prepared == user_environ


ENTRY = {
    "record_id": 0,
    "process_group": ["0", "default_pg"],
    "profiling_name": "nccl2:all_reduce",
    "input_sizes": [[16]],
    "input_dtypes": ["Float"],
    "output_sizes": [[16]],
    "output_dtypes": ["Float"],
}


def used_backends(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The default group stands for one of each of these backends, which need a device."""
    used = [(dist.group.WORLD, name, object) for name in names]
    monkeypatch.setattr(flight_recorder, "backends", lambda: iter(used))


def test_a_build_for_cuda_without_a_driver_is_asked_for_what_gloo_recorded(group, monkeypatch):
    """NCCL's recorder is there, and asking it means to ask the device that is not there."""

    def dump(*_: Any) -> str:
        raise AssertionError("NCCL has no group")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)
    flight = FlightRecorder(unseen=("collectives inside DistributedDataParallel",), environ={})
    flight.begin_step()
    dist.all_reduce(torch.ones(16))
    flight.end_step(3)
    window = flight.close_window().read()
    span = window.spans.get(3)
    assert span is not None and window.gaps == ()
    assert [entry.nbytes for entry in window.unseen(span, ())] == [64]


@pytest.mark.parametrize("built", ["nccl", "nccl2"])
def test_the_recorder_of_the_backend_that_was_built_is_only(group, monkeypatch, built):
    """From torch 2.15 on "nccl" is a backend whose calls a hook records under its own name."""
    dumped = []

    def entries(name: str) -> str:
        dumped.append(name)
        return json.dumps({"entries": [ENTRY | {"time_created_ns": time.time_ns()}]})

    hooks = {dist.group.WORLD: object()} if built == "nccl2" else {}
    world = dist.distributed_c10d._world
    monkeypatch.setattr(type(world), "pg_flight_recorder_hooks", hooks, raising=False)
    dumps = {
        "_dump_nccl_trace_json": lambda: entries("nccl"),
        "_dump_fr_trace_json": lambda backend="gloo": entries(backend),
    }
    for name, dump in dumps.items():
        monkeypatch.setattr(_distributed_c10d, name, dump, raising=False)
    monkeypatch.setattr(flight_recorder, "find_exchange", lambda: lambda mode: mode)
    used_backends(monkeypatch, built)
    assert [dump() is not None for dump in find_dumps().values() if dump] == [True]
    assert dumped == [built]


def test_a_backend_without_a_recorder_is_named_and_costs_no_other(group, monkeypatch):
    used_backends(monkeypatch, "mpi", "gloo")
    flight = FlightRecorder(unseen=("collectives through DTensor",), environ={})
    flight.begin_step()
    dist.all_reduce(torch.ones(16))
    flight.end_step(3)
    window = flight.close_window().read()
    span = window.spans.get(3)
    assert span is not None and len(window.unseen(span, ())) == 1
    assert window.gaps == ("collectives of mpi called from C++: unseen, no flight recorder",)
    end = WindowRecord(window=0, first_step=3, last_step=3, num_faults=0, num_dropped=0)
    (remark,) = WindowRecords(calls=window).coverage((), end)
    assert (remark.name, remark.installed) == (window.gaps[0], 0)


@pytest.mark.skipif(
    not hasattr(type(dist.distributed_c10d._world), "pg_flight_recorder_hooks"),
    reason="torch before 2.15 records only backends that do it themselves",
)
def test_what_a_hook_of_torchs_own_recorded_is_read_under_its_backends_name():
    """The backend named fake does nothing, but torch's hook records its calls if it is asked to."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    world = dist.distributed_c10d._world
    world.pg_flight_recorder_hooks[dist.group.WORLD] = _distributed_c10d.FlightRecorderHook.attach(
        dist.group.WORLD, [0, 1]
    )
    try:
        flight = FlightRecorder(unseen=("collectives through DTensor",), environ={})
        flight.begin_step()
        dist.all_reduce(torch.ones(16))
        flight.end_step(3)
        window = flight.close_window().read()
        span = window.spans.get(3)
        assert span is not None and window.gaps == ()
        assert [entry.nbytes for entry in window.unseen(span, ())] == [64]
    finally:
        dist.destroy_process_group()


def test_a_recorder_that_cannot_be_asked_costs_no_record(group, caplog):
    def dump() -> str:
        raise RuntimeError("the capture mode of a thread cannot be changed: error 35")

    flight = FlightRecorder(only(dump), environ=TIMED)
    log = step(flight, 3)
    plain = [*Attribution(log).records()]
    assert [*flight.close_window().read().amend(iter(plain))] == plain
    assert "error 35" in caplog.text and len(caplog.records) == 1
