"""The real flight recorder of a gloo group; durations, which only NCCL has, are planted in it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_timeline import capturing, installed
from torch._C import _distributed_c10d

from forerun.calib.records.record_kinds import CollectiveRecord
from forerun.hooks.process.guard import Guard
from forerun.hooks.recording.attribution import Attribution
from forerun.hooks.recording.flight_recorder import (
    FlightRecorder,
    capture_safe_dump,
    find_dump,
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
    # A build for CUDA keeps gloo's calls apart from those of NCCL.
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None) or find_dump()
    assert dump is not None
    result = json.loads(dump())
    for entry in result["entries"][-number:]:
        entry["duration_ms"] = DURATION_MS
    return json.dumps(result)


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
    flight = FlightRecorder(lambda: dump_with_durations(8), environ=TIMED)
    dist.all_reduce(torch.ones(4))  # before the step: none of its calls
    logs = [step(flight, 3), step(flight, 6)]
    window = flight.close_window()
    for log in logs:
        records = [*window.amend(Attribution(log).records())]
        calls = [r for r in records if isinstance(r, CollectiveRecord)]
        assert [r.is_async for r in calls] == [True, True, True, False]
        assert [r.duration_ns for r in calls[:3]] == [125_000] * 3
        assert not any(r.is_bound for r in calls)
        assert calls[3].duration_ns != 125_000


@pytest.mark.parametrize("dump", [None, lambda: "{damaged duration_ms"])
def test_without_durations_the_records_stay_as_they_are(group, dump, caplog):
    flight = FlightRecorder(dump, environ=TIMED)
    log = step(flight, 3)
    plain = [*Attribution(log).records()]
    assert [*flight.close_window().amend(iter(plain))] == plain
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

    flight = FlightRecorder(dump, unseen=unseen, environ=environ)
    log = step(flight, 3)
    assert [*flight.close_window().amend(Attribution(log).records())]
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


def test_the_runtime_that_torch_was_built_for_is_asked(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    libraries = {"libcudart.so.13": Runtime(0)}
    exchange = find_exchange(libraries.__getitem__)
    assert exchange is not None
    assert (exchange(2), exchange(1)) == (1, 2)
    libraries["libcudart.so.13"].code = 3
    with pytest.raises(OSError, match="error 3"):
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
