"""Calls that only the flight recorder has seen, planted in the log of a step."""

from __future__ import annotations

import json
from array import array
from itertools import count
from typing import Any

import pytest

from forerun.calib.marks.step_marks import Code, TransferKind, unpack_mark
from forerun.calib.marks.window_calls import KnownGroup, WindowCalls
from forerun.calib.marks.window_records import WindowRecords, add_unseen
from forerun.calib.records.flight import HostSpan
from forerun.calib.records.record_kinds import CollectiveRecord, PhaseRecord
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.hooks.recording.flight_recorder import FlightWindow
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch

UNIX_NS, CLOCK_NS, MS = 10**18, 5_000_000_000, 1_000_000
NAME = "collectives inside DistributedDataParallel"


def entry(number: int, at_ms: float, size: int, name: str = "gloo:all_reduce", **more: Any) -> dict:
    return {
        "record_id": number,
        "process_group": ["0", "default_pg"],
        "profiling_name": name,
        "time_created_ns": UNIX_NS + round(at_ms * MS),
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_sizes": [[size]],
        "output_dtypes": ["Float"],
    } | more


def window(*entries: dict) -> WindowCalls:
    span = HostSpan(begin_ns=UNIX_NS, end_ns=UNIX_NS + 100 * MS, clock_ns=CLOCK_NS)
    return FlightWindow(
        {"gloo": lambda: json.dumps({"entries": entries})},
        {3: span},
        {"default_pg#0": KnownGroup(role=GroupRole.DP, ranks=(0, 1))},
        (NAME,),
    ).read()


def log_of(*calls: tuple[str, str, float], is_host: bool = True) -> StepLog:
    """A step with those begins and ends of phases, at times in milliseconds."""
    times = iter([CLOCK_NS + round(at * MS) for _, _, at in calls])
    recorder = Recorder(HostStopwatch(lambda: next(times)))
    log = recorder.open(StepLog(step=3, window=0, sites=()))
    for act, name, _ in calls:
        (recorder.begin_phase if act == "begin" else recorder.end_phase)(name)
    recorder.close()
    log.is_host = is_host
    return log


def passes(is_host: bool = True) -> StepLog:
    return log_of(
        *(("begin", "forward-compute", 1), ("end", "forward-compute", 10)),
        *(("begin", "backward-compute", 11), ("end", "backward-compute", 50)),
        is_host=is_host,
    )


def records(log: StepLog, flight: WindowCalls) -> tuple[list[CollectiveRecord], list[PhaseRecord]]:
    records = [*WindowRecords(calls=flight).of(log)]
    return (
        [r for r in records if isinstance(r, CollectiveRecord)],
        [r for r in records if isinstance(r, PhaseRecord)],
    )


def test_the_last_bucket_of_a_pass_ends_with_it_and_the_others_are_bounds():
    flight = window(entry(0, 20, 1000), entry(1, 42, 500))
    calls, phases = records(passes(), flight)
    assert [(c.collective, c.role, c.nbytes, c.sequence) for c in calls] == [
        (Collective.ALL_REDUCE, GroupRole.DP, 4000, 0),
        (Collective.ALL_REDUCE, GroupRole.DP, 2000, 1),
    ]
    assert [c.is_bound for c in calls] == [True, False]
    assert calls[1].issue_ns == CLOCK_NS + 42 * MS
    assert calls[1].duration_ns == calls[1].exposed_ns == 8 * MS
    backward = next(p for p in phases if p.name == "backward-compute")
    assert (backward.duration_ns, backward.wait_ns) == (39 * MS, 8 * MS)


def test_buffers_before_a_forward_pass_end_where_its_first_module_begins():
    times = iter([CLOCK_NS + at * MS for at in (1, 7, 9, 10)])
    recorder = Recorder(HostStopwatch(lambda: next(times)))
    log = recorder.open(StepLog(step=3, window=0, sites=()))
    recorder.begin_phase("forward-compute")
    recorder.begin_span(0)
    recorder.end_span(-1, 0, None, 0)
    recorder.end_phase("forward-compute")
    recorder.close()
    add_unseen(
        log, window(entry(0, 3, 100, "gloo:broadcast"), entry(1, 9.5, 100, "gloo:broadcast"))
    )
    codes = [
        (unpack_mark(what)[0], mark - CLOCK_NS)
        for what, mark in zip(log.what, log.marks, strict=True)
    ]
    assert codes[:4] == [
        (Code.PHASE_BEGIN, MS),
        (Code.WAIT_BEGIN, 3 * MS),
        (Code.CALL_DONE, 7 * MS),
        (Code.SPAN_BEGIN, 7 * MS),
    ]


def test_on_a_device_the_recorders_duration_counts_and_the_marks_stay():
    log = passes(is_host=False)
    marks = array("q", log.marks)
    calls, _ = records(log, window(entry(0, 20, 1000, duration_ms=0.5), entry(1, 42, 500)))
    assert log.marks == marks
    assert [(c.duration_ns, c.is_bound) for c in calls] == [(MS // 2, False), (58 * MS, True)]


def test_a_call_that_a_hook_has_seen_is_not_added():
    log = passes()
    kind = TransferKind(
        collective=Collective.REDUCE_SCATTER, role=GroupRole.DP, group="default_pg#0", ranks=(0, 1)
    )
    log.transfer_kinds.append(log.kind_number(kind))
    log.transfer_sequences.append(0)
    log.transfer_nbytes.append(4000)
    log.num_calls[0] += 1
    # gloo reduces and scatters by an all-reduce.
    assert add_unseen(log, window(entry(0, 20, 1000))) == []
    assert len(log.transfer_kinds) == 2


@pytest.mark.parametrize(
    "more",
    [
        {"process_group": ["7", "another"]},
        {"input_dtypes": ["Strange"]},
        {"time_created_ns": UNIX_NS - 1},
        {"profiling_name": "gloo:send 0->1"},
        {"record_id": 9},  # the ring has forgotten what the step began with
    ],
)
def test_what_is_not_sure_is_left_out(more):
    assert add_unseen(log := passes(), window(entry(0, 20, 1000, **more))) == []
    assert len(log.transfer_kinds) == 1


def test_marks_stay_in_order_where_two_clocks_differ():
    late = count(12)
    log = passes()
    add_unseen(log, window(*(entry(n, next(late) - 11.5, 10) for n in range(4))))
    assert list(log.marks) == sorted(log.marks)
    assert len(log.what) == len(log.marks)
