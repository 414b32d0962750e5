"""Memory of the recorder, measured while a large model's schedule is played through it."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import pytest
from simulated_steps import KINDS

from forerun.calib.marks._attribution import Attribution
from forerun.calib.marks.step_marks import TransferKind
from forerun.calib.records.record_kinds import BACKWARD, FORWARD, OperatorRecord, PhaseRecord
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.hooks.recording.window import samples
from forerun.hooks.sensors.recorder import Recorder, backward_mark
from forerun.hooks.sensors.step_log import MAX_WINDOW_MARKS, Site, StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch

LIMIT_NBYTES = 50 * 2**20
NUM_LAYERS, NUM_CHUNKS, NUM_MICROBATCHES, NUM_STAGES = 100, 4, 512, 8
RAW = ((8, 1, 4, 4), (8, 1, 6), (8, 1, 4, 4))
TENSOR_PARALLEL = TransferKind(
    collective=Collective.ALL_REDUCE, role=GroupRole.TP, group="tp#1", ranks=(0, 1)
)


def play_pass(recorder: Recorder, log: StepLog, name: str) -> None:
    """One chunk of one micro-batch: its operators, and two synchronous transfers per layer."""
    recorder.begin_phase(name)
    transfers = log.kind_number(TENSOR_PARALLEL)
    for layer in range(NUM_LAYERS // NUM_CHUNKS):
        for number, _ in enumerate(KINDS):
            span = recorder.begin_span(layer * len(KINDS) + number)
            if span >= 0:
                recorder.end_span(span, recorder.stopwatch.mark(), RAW, 2)
                for is_begin in (True, False):
                    recorder.mark_backward(log, [backward_mark(span, is_begin=is_begin)])
        for _ in range(2):
            transfer = recorder.add_transfer(transfers, 1 << 20)
            for _ in range(2):
                recorder.begin_wait(transfer)
                recorder.end_wait(transfer)
    recorder.end_phase(name)


@pytest.mark.slow
def test_a_window_of_a_hundred_layers_and_512_microbatches_fits_50_mib() -> None:
    num_steps = 10
    order = tuple(
        microbatch
        for first in range(0, NUM_MICROBATCHES, NUM_STAGES)
        for _ in range(NUM_CHUNKS)
        for microbatch in range(first, first + NUM_STAGES)
    )
    sites = tuple(Site(kind=kind, layer=n) for n in range(NUM_LAYERS) for kind in KINDS)
    recorder = Recorder(HostStopwatch())
    tracemalloc.start()
    try:
        logs, num_passes = [], 0
        for step in range(num_steps):
            log = recorder.open(
                StepLog(
                    step=step,
                    window=0,
                    sites=sites,
                    samples=samples(order, step),
                    max_marks=MAX_WINDOW_MARKS // num_steps,
                )
            )
            for _ in order:
                # The first step is played to its end; the others until they are full.
                if step and log.num_free_marks < MAX_WINDOW_MARKS // num_steps // 8:
                    break
                play_pass(recorder, log, FORWARD)
                num_passes += 1
            for _ in range(8):
                play_pass(recorder, log, BACKWARD)
            logs.append(recorder.close())
        operators, phases = Counter(), 0
        for log in logs[:2]:
            assert log.resolve()
            attribution = Attribution(log)
            for record in attribution.records():
                if isinstance(record, OperatorRecord):
                    operators[record.step, record.phase, record.microbatch] += 1
                phases += isinstance(record, PhaseRecord)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= LIMIT_NBYTES
    assert num_passes > len(order) and phases > len(order) + 8
    assert {step for step, _, _ in operators} == {0, 1}
    assert logs[0].num_dropped > 0
    whole = NUM_LAYERS // NUM_CHUNKS * len(KINDS)
    assert {count % whole for count in operators.values()} == {0}
