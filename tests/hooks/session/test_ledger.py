"""A window over a device whose events are dear: how late its end is, and what it costs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from device_clock import Clock
from device_streams import Device, install_device, stopwatch_on, uninstall_device
from device_truth import Truth
from hypothesis import example, given
from hypothesis import strategies as st

from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.record_kinds import (
    FORWARD,
    SCHEMA,
    CoverageRecord,
    Header,
    OperatorRecord,
    PhaseRecord,
    StepRecord,
    WindowRecord,
)
from forerun.calib.samples.store import read_run
from forerun.calib.workload.operators import OperatorKind
from forerun.hooks.process.guard import Guard
from forerun.hooks.recording.window import WindowPlan, samples, thin_samples
from forerun.hooks.recording.writer import RecordWriter
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import Site, StepLog
from forerun.hooks.sensors.stopwatch import MAX_EVENTS
from forerun.hooks.session._ledger import MOST_LATE_S, MOST_LATE_STEPS, Ledger
from forerun.hooks.session._mark_budget import LEAST_MICROBATCHES, MARKS_PER_S, MarkBudget

SITES = tuple(Site(kind=OperatorKind.LINEAR_FC1, layer=layer) for layer in range(10))
OPERATOR_S, WINDOW = 0.0005, 20


def play(recorder: Recorder, clock: Clock, device: Device, num_passes: int) -> None:
    for _ in range(num_passes):
        recorder.begin_phase(FORWARD)
        for layer in range(len(SITES)):
            span = recorder.begin_span(layer)
            clock.launch(device.line, OPERATOR_S)
            if span >= 0:
                recorder.end_span(span, recorder.stopwatch.mark(), ((8, 1, 4), (8, 1, 6)), 2)
        recorder.end_phase(FORWARD)


def max_late_steps(step_s: float) -> int:
    """Steps after a window's end in which its events are still read."""
    return max(MOST_LATE_STEPS, math.ceil(MOST_LATE_S / step_s))


def run_window(directory: Path, num_passes: int, step_s: float) -> tuple[RunRecords, int]:
    """Every pass timed, whatever a budget would say; and how many steps the end came late."""
    clock = Clock(Truth())
    device = Device(clock)
    install_device(device)
    guard = Guard(lambda: None)
    header = Header(
        schema=SCHEMA, run_id="r", rank=0, world_size=1, created_by="test", device="device",
        started_unix_s=1.0,
    )  # fmt: skip
    writer, closed = RecordWriter(directory, lambda: header, guard), []
    ledger = Ledger(writer, guard, lambda event, **_: closed.append(event))
    recorder = Recorder(stopwatch_on(device))
    plan, late = WindowPlan(steps=WINDOW, num_warmup=0), 0
    for step in range(WINDOW + 2 * max_late_steps(step_s)):
        is_inside = step < WINDOW
        if is_inside and plan.at(step).is_hooked:
            log = recorder.open(
                StepLog(
                    step=step, window=0, sites=SITES, max_marks=recorder.stopwatch.num_available
                )
            )
            play(recorder, clock, device, num_passes)
            clock.synchronize()
            assert recorder.close() is log
            ledger.add_log(log)
        if is_inside:
            record = StepRecord(
                step=step, window=0, start_ns=step, duration_ns=1, gap_ns=0,
                is_hooked=plan.at(step).is_hooked,
            )  # fmt: skip
            ledger.add_step(record, is_warmup=False)
        if step == WINDOW - 1:
            ledger.end_window(None)
        ledger.drain(step_s=step_s)
        late += not is_inside and ledger._ending is not None
    writer.close()
    uninstall_device()
    return read_run(directory), late


@pytest.mark.slow
@pytest.mark.parametrize(("num_passes", "step_s"), [(20, 1.0), (50, 0.06), (1000, 0.05)])
def test_a_window_ends_in_time_and_loses_nothing_unsaid(
    tmp_path: Path, num_passes: int, step_s: float
) -> None:
    """At 2 us each, a step of 50 ms can read few of 22,000 marks: the loss is reported.

    A Llama of twelve layers has 1,100 in 60 ms, and all of them are read.
    """
    run, late = run_window(tmp_path, num_passes, step_s)
    assert late <= max_late_steps(step_s)
    records = run.records[0]
    operators = [r for r in records if isinstance(r, OperatorRecord)]
    assert all(
        abs(op.duration_ns - OPERATOR_S * 1e9) < 0.03 * OPERATOR_S * 1e9 + 2000 for op in operators
    )
    ends = [r for r in records if isinstance(r, WindowRecord)]
    with_detail = {r.step for r in records if isinstance(r, PhaseRecord)}
    hooked = {r.step for r in records if isinstance(r, StepRecord) and r.is_hooked}
    remarks = [r.name for r in records if isinstance(r, CoverageRecord) and r.installed == 0]
    is_whole = with_detail == hooked
    assert len(ends) == 1 and (ends[0].num_dropped == 0) == is_whole
    assert operators and is_whole == (num_passes < 1000)
    assert any("dropped" in name for name in remarks) != is_whole
    assert any("not read in time" in name for name in remarks) != is_whole


@example(147, 1924, 2.5, 5)
@given(
    st.integers(1, 512),
    st.integers(1, 2000),
    st.floats(0.001, 100.0),
    st.integers(2, 10),
)
def test_a_window_has_no_more_marks_than_its_time_has_room_for(
    num_microbatches: int, num_marks: int, step_s: float, num_steps: int
) -> None:
    budget = MarkBudget(num_sites=1)
    log = StepLog(step=0, window=0, sites=(), samples_transfers=True)
    log.num_pass_marks = num_marks
    budget.learn(log, is_thin=False)
    order = tuple(range(num_microbatches))
    timed = []
    for number in range(num_steps):
        if num_microbatches > 1:
            chosen = budget.chosen(samples(order, number), number, num_steps, step_s)
            timed.append({m for m in chosen if m >= 0})
        else:  # all passes of a step, or none
            timed.append(set() if budget.chosen((), number, num_steps, step_s) else {0})
    total = sum(map(len, timed))
    max_timed = num_steps * min(2 * MARKS_PER_S * step_s, MAX_EVENTS // 3) / num_marks
    assert total >= 1
    # Steps of 147 micro-batches time 19 or 18 of them before thinning, and one more in all.
    is_uneven = num_microbatches % 8 > 0
    assert total <= max(LEAST_MICROBATCHES, max_timed + is_uneven)


@given(st.integers(0, 7), st.integers(0, 50), st.integers(1, 40))
def test_a_rank_with_less_room_times_none_that_another_does_not(
    level: int, num_hooked: int, num_microbatches: int
) -> None:
    order = samples(tuple(range(num_microbatches)), num_hooked)
    few, more = thin_samples(order, num_hooked, level + 1), thin_samples(order, num_hooked, level)
    timed = [{m for m in one if m >= 0} if one else {0} for one in (few, more)]
    assert timed[0] <= timed[1]
