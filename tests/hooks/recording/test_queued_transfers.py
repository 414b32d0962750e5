"""Overlapped gradients on a device: buckets queue, and each takes what the device was charged."""

from __future__ import annotations

import pytest
from device_clock import Clock
from device_streams import Device, Event, install_device, uninstall_device
from device_truth import Truth

from forerun.calib.marks._attribution import Attribution
from forerun.calib.marks.run_records import RunRecords
from forerun.calib.marks.step_marks import TransferKind
from forerun.calib.records.record_kinds import BACKWARD, CollectiveRecord, Header, StepRecord
from forerun.calib.samples.table import build_live_table
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import DeviceStopwatch

SCATTER = TransferKind(
    collective=Collective.REDUCE_SCATTER, role=GroupRole.DP, group="dp#1", ranks=(0, 1)
)
BUCKETS_MS = {1: 3.0, 2: 2.5, 3: 3.5}
"""By payload in MiB, what a bucket takes."""
PASS = (1, 2, 3, 2, 3, 1)
BEFORE_MS = {1: 13.0, 2: 6.5, 3: 9.0}
"""Recorded times from the call on: the median of a payload's transfers that were waited for."""


def step() -> list[CollectiveRecord]:
    """A backward pass of 1 ms a layer, a bucket behind each, all waited for at its end."""
    clock = Clock(Truth())
    device = Device(clock)
    install_device(device)
    watch = DeviceStopwatch(
        lambda: Event(enable_timing=True),
        stream_key=lambda: device.current.cuda_stream,
        current_stream=lambda: device.current,
        is_capturing=device.is_capturing,
    )
    recorder, main, line = Recorder(watch), device.default.line, clock.line()
    clock.launch(main, 1.0)  # the host is ahead of the device
    log = recorder.open(StepLog(step=0, window=0, sites=(), max_marks=1000))
    recorder.begin_phase(BACKWARD)
    begun = []
    for nmib in PASS:
        clock.launch(main, 0.001)
        transfer = recorder.add_transfer(log.kind_number(SCATTER), 2**20 * nmib)
        recorder.begin_wait(transfer)
        clock.stall(line, main.busy_s, main, is_logged=False)
        begun.append((transfer, clock.launch(line, BUCKETS_MS[nmib] / 1e3)[1]))
        recorder.end_wait(transfer)
    for transfer, end_s in begun:
        recorder.begin_wait(transfer)
        clock.stall(main, end_s, line)
        recorder.end_wait(transfer)
    recorder.end_phase(BACKWARD)
    recorder.close()
    clock.synchronize()
    assert log.resolve()
    uninstall_device()
    return [r for r in Attribution(log).records() if isinstance(r, CollectiveRecord)]


def table(device: str) -> dict[int, tuple[float, bool]]:
    """Time in milliseconds and whether it is a bound, by payload in MiB."""
    common = {"run_id": "run", "world_size": 2, "created_by": "", "started_unix_s": 0.0}
    done = StepRecord(
        step=0, window=0, start_ns=0, duration_ns=30_000_000, gap_ns=0, is_hooked=True
    )
    records = (done, *step())
    run = RunRecords(
        run_id="run",
        headers={r: Header(schema=1, rank=r, device=device, **common) for r in range(2)},
        configs={},
        records=dict.fromkeys(range(2), records),
    )
    rows = build_live_table(run).samples
    rows = rows[rows["kind"] == "reduce_scatter"]
    result = zip(rows["nbytes"], rows["time_s"], rows["is_bound"], strict=True)
    return {nbytes // 2**20: (time_s * 1e3, bool(bound)) for nbytes, time_s, bound in result}


@pytest.mark.slow
def test_m6_overlapped_buckets_take_what_the_device_was_charged() -> None:
    """The last is waited for 12 ms, of which it ran 3: it had queued behind five."""
    result = table("cuda")
    assert not any(is_bound for _, is_bound in result.values())
    assert {n: ms for n, (ms, _) in result.items()} == pytest.approx(
        BUCKETS_MS, rel=0.03, abs=0.002
    )


def test_m6_on_a_host_transfers_run_side_by_side_and_nothing_is_taken_off() -> None:
    assert {n: ms for n, (ms, _) in table("cpu").items()} == pytest.approx(BEFORE_MS, rel=0.01)
