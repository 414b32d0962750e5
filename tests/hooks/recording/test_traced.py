"""What a device's trace becomes: events with the profiler's interface and planted times."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from forerun.calib.records.record_kinds import CollectiveRecord, TraceRecord
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.operators import OperatorKind, Phase
from forerun.hooks.recording.traced import MARK, TracedStep
from forerun.hooks.sensors.recorder import BACKWARD, FORWARD, Recorder, backward_mark
from forerun.hooks.sensors.step_log import Site, StepLog, TransferKind
from forerun.hooks.sensors.stopwatch import HostReadings

GROUP = "DATA_PARALLEL_GROUP#2"
TOKENS, IN, OUT = 8, 4, 16


@dataclass
class Event:
    """The methods of the profiler's event that are read; a device is not needed for them."""

    what: str
    at_ns: int
    lasts_ns: int = 0
    kind: str = "cpu_op"
    number: int = 0
    link: int = 0
    dims: list[list[int]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    def name(self) -> str:
        return self.what

    def device_type(self) -> Any:
        return SimpleNamespace(name="CUDA" if self.kind == "kernel" else "CPU")

    def activity_type(self) -> str:
        return self.kind

    def start_ns(self) -> int:
        return self.at_ns

    def duration_ns(self) -> int:
        return self.lasts_ns

    def start_thread_id(self) -> int:
        return 1

    def correlation_id(self) -> int:
        return self.number

    def linked_correlation_id(self) -> int:
        return self.link

    def shapes(self) -> list[list[int]]:
        return self.dims

    def metadata_json(self) -> str:
        return json.dumps(self.meta)[1:-1]


class CountingStopwatch:
    """Marks are numbered from 1 on; mark n is an event of the trace at n thousand."""

    is_host = False

    def __init__(self) -> None:
        self.num_marks = 0

    def begin_step(self) -> None:
        pass

    def mark(self) -> int:
        self.num_marks += 1
        return self.num_marks

    def end_step(self) -> HostReadings:
        return HostReadings()


def played() -> tuple[StepLog, int]:
    stopwatch = CountingStopwatch()
    recorder = Recorder(stopwatch)
    log = recorder.open(
        StepLog(step=5, window=0, sites=(Site(kind=OperatorKind.LINEAR_FC1, layer=3),))
    )
    recorder.begin_phase(FORWARD)  # 1
    span = recorder.begin_span(0)  # 2
    recorder.end_span(span, stopwatch.mark(), ((TOKENS, 1, IN), (TOKENS, 1, OUT)), 2)  # 3
    recorder.end_phase(FORWARD)  # 4
    recorder.begin_phase(BACKWARD)  # 5
    recorder.mark_backward(log, [backward_mark(span, is_begin=True)])  # 6
    recorder.mark_backward(log, [backward_mark(span, is_begin=False)])  # 7
    recorder.end_phase(BACKWARD)  # 8
    kind = log.kind_number(
        TransferKind(
            collective=Collective.REDUCE_SCATTER, role=GroupRole.DP, group=GROUP, ranks=(0, 1)
        )
    )
    for _ in range(2):
        transfer = recorder.add_transfer(kind, 64)
        recorder.begin_wait(transfer)  # 9, 11
        recorder.end_wait(transfer)  # 10, 12
    recorder.close()
    return log, stopwatch.num_marks


def launch(number: int, at_ns: int, link: int = 0) -> Event:
    return Event("cudaLaunchKernel", at_ns, 5, "cuda_runtime", number, link)


def kernel(what: str, lasts_ns: int, number: int, link: int = 0, **meta: object) -> Event:
    return Event(what, 90_000 + number, lasts_ns, "kernel", number, link, meta=dict(meta))


def message(name: str) -> dict[str, object]:
    group, _, number = GROUP.partition("#")
    return {
        "Collective name": name,
        "Process Group Description": group,
        "Process Group Name": number,
    }


def trace(*more: Event) -> TracedStep:
    log, num_marks = played()
    marks = [Event(MARK, 1000 * n, 1, number=900 + n) for n in range(1, num_marks + 1)]
    events = [
        *marks,
        Event("aten::linear", 2100, 400, number=20),
        launch(1, 2200, 20),
        kernel("nvjet_tst_128x64", 40, 1, 20),
        launch(2, 4500),
        kernel("vectorized_add", 999, 2),  # launched while no operator was open
        Event("aten::mm", 6100, 100, number=30, dims=[[TOKENS, OUT], [OUT, IN]]),
        launch(3, 6150, 30),
        kernel("sm90_xmma_gemm_bf16", 41, 3, 30),
        Event("aten::mm", 6300, 100, number=31, dims=[[OUT, TOKENS], [TOKENS, IN]]),
        launch(4, 6350, 31),
        kernel("sm90_xmma_gemm_bf16", 50, 4, 31),
        kernel("splitKreduce_kernel", 2, 5, 31),
        launch(6, 6700),
        kernel("reduce_kernel", 7, 6),
        *more,
    ]
    return TracedStep(log=log, events=events, num_marks=num_marks, first_transfer=1, is_device=True)


def test_kernels_go_to_the_operator_that_launched_them():
    found = [r for r in trace().records(lambda _: None) if isinstance(r, TraceRecord)]
    assert [(r.phase, r.duration_ns, r.num_kernels) for r in found] == [
        (Phase.FORWARD, 40, 1),
        (Phase.INPUT_GRADIENT, 41, 1),
        (Phase.WEIGHT_GRADIENT, 59, 3),
    ]
    assert {(r.step, r.layer, r.shape) for r in found} == {(5, 3, (TOKENS, IN, OUT))}


def test_transfers_take_the_time_of_their_kernels_in_order():
    name = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"
    traced = trace(
        kernel(name, 70, 8, **message("_reduce_scatter_base")),
        launch(8, 11_500),
        kernel(name, 60, 7, **message("_reduce_scatter_base")),
        launch(7, 9_500),
    )
    calls = [r for r in traced.records(lambda _: None) if isinstance(r, CollectiveRecord)]
    assert [(r.sequence, r.duration_ns, r.is_bound, r.nbytes) for r in calls] == [
        (0, 60, False, 64),
        (1, 70, False, 64),
    ]


def test_a_kernel_too_few_leaves_the_transfers_of_its_group_out():
    traced = trace(
        kernel("ncclDevKernel_ReduceScatter", 60, 7, **message("_reduce_scatter_base")),
        launch(7, 9_500),
    )
    assert not any(isinstance(r, CollectiveRecord) for r in traced.records(lambda _: None))


def test_reading_pauses_to_let_training_run():
    log, num_marks = played()
    many = [Event("aten::add", 2000 + n, 1, number=n) for n in range(20_000)]
    marks = [Event(MARK, 1000 * n, 1) for n in range(1, num_marks + 1)]
    pauses: list[float] = []
    traced = TracedStep(
        log=log, events=[*marks, *many], num_marks=num_marks, first_transfer=1, is_device=False
    )
    traced.records(pauses.append)
    assert len(pauses) > 5
    assert traced.events == ()
