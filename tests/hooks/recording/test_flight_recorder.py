"""The real flight recorder of a gloo group; durations, which only NCCL has, are planted in it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from forerun.calib.records.record_kinds import CollectiveRecord
from forerun.hooks.process.guard import Guard
from forerun.hooks.recording.attribution import Attribution
from forerun.hooks.recording.flight_recorder import FlightRecorder, find_dump, prepare
from forerun.hooks.sensors.process_groups import ProcessGroupHooks
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch

DURATION_MS = 0.125


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def timed(number: int) -> str:
    """The real dump, but the entries have durations, which grow with their number."""
    # A build for CUDA keeps gloo's calls apart from those of NCCL.
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None) or find_dump()
    assert dump is not None
    found = json.loads(dump())
    for entry in found["entries"][-number:]:
        entry["duration_ms"] = DURATION_MS
    return json.dumps(found)


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
    flight = FlightRecorder(lambda: timed(8))
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
    flight = FlightRecorder(dump)
    log = step(flight, 3)
    plain = [*Attribution(log).records()]
    assert [*flight.close_window().amend(iter(plain))] == plain
    assert bool(caplog.records) == (dump is not None)


def test_the_environment_is_prepared_where_the_user_said_nothing():
    environ: dict[str, str] = {}
    prepare(environ)
    assert environ == {"TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_FR_BUFFER_SIZE": "20000"}
    own = {"TORCH_NCCL_ENABLE_TIMING": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "10"}
    told = dict(own)
    prepare(told)
    assert told == own
