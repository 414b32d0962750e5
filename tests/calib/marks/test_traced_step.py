"""Records from a device's trace: events with the profiler's interface and planted times."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.marks._traced_records import traced_records
from forerun.calib.marks.step_marks import TransferKind
from forerun.calib.marks.traced_step import MARK, TracedStep
from forerun.calib.records.chrome_trace import events_in, from_chrome
from forerun.calib.records.kineto_trace import CPU_OP, DEVICE_WORK, USER_RANGE, work_of
from forerun.calib.records.record_kinds import (
    BACKWARD,
    FORWARD,
    CollectiveRecord,
    CoverageRecord,
    Record,
    TraceRecord,
)
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.operators import OperatorKind, Phase
from forerun.hooks.sensors.recorder import Recorder, backward_mark
from forerun.hooks.sensors.step_log import Site, StepLog
from forerun.hooks.sensors.stopwatch import HostReadings

LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "hipLaunchKernel")
GROUP = "DATA_PARALLEL_GROUP#2"
TOKENS, IN, OUT = 8, 4, 16


@dataclass
class Event:
    """An event of a trace, by the numbers that tie launches to operations."""

    what: str
    at_ns: int
    lasts_ns: int = 0
    kind: str = "cpu_op"
    number: int = 0
    link: int = 0
    dims: list[list[int]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    def chrome(self) -> dict[str, Any]:
        """Return the event as the profiler exports it."""
        is_operation = self.kind in (CPU_OP, USER_RANGE)
        numbers = (
            {"External id": self.number}
            if is_operation
            else {"External id": self.link, "correlation": self.number}
        )
        return {
            "ph": "X",
            "cat": self.kind,
            "name": self.what,
            "pid": int(self.kind in DEVICE_WORK),
            "tid": 1,
            "ts": self.at_ns / 1000,
            "dur": self.lasts_ns / 1000,
            "args": {**numbers, "Input Dims": self.dims, **self.meta},
        }


@dataclass
class Trace:
    """A step and the events of its trace."""

    step: TracedStep
    events: list[Event]

    def records(self) -> list[Record]:
        """Return the records, read back from the line and the file's text."""
        value = json.loads(self.step.to_line())
        text = json.dumps({"traceEvents": [event.chrome() for event in self.events]})
        return [*traced_records(TracedStep.from_json(value), events_in([text]))]

    def remarks(self) -> list[str]:
        """Return the names in the coverage."""
        return [r.name for r in self.records() if isinstance(r, CoverageRecord)]


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


LINEAR = ((TOKENS, 1, IN), (TOKENS, 1, OUT))


AMAX = "TENSOR_AND_DATA_PARALLEL_GROUP#5"


def played(
    kind: OperatorKind = OperatorKind.LINEAR_FC1,
    shapes: tuple[Any, ...] = LINEAR,
    *,
    has_amax: bool = False,
) -> tuple[StepLog, int]:
    stopwatch = CountingStopwatch()
    recorder = Recorder(stopwatch)
    log = recorder.open(StepLog(step=5, window=0, sites=(Site(kind=kind, layer=3),)))
    recorder.begin_phase(FORWARD)  # 1
    span = recorder.begin_span(0)  # 2
    recorder.end_span(span, stopwatch.mark(), shapes, 2)  # 3
    recorder.end_phase(FORWARD)  # 4
    recorder.begin_phase(BACKWARD)  # 5
    recorder.mark_backward(log, [backward_mark(span, is_begin=True)])  # 6
    if has_amax:  # inside the node of the first module; its marks are two more from here on
        kind_of = TransferKind(
            collective=Collective.ALL_REDUCE, role=GroupRole.OTHER, group=AMAX, ranks=(0, 1)
        )
        reduction = recorder.add_transfer(log.kind_number(kind_of), 36)
        recorder.begin_wait(reduction)  # 7
        recorder.end_wait(reduction)  # 8
    recorder.mark_backward(log, [backward_mark(span, is_begin=False)])  # 7
    recorder.end_phase(BACKWARD)  # 8
    number = log.kind_number(
        TransferKind(
            collective=Collective.REDUCE_SCATTER, role=GroupRole.DP, group=GROUP, ranks=(0, 1)
        )
    )
    for _ in range(2):
        transfer = recorder.add_transfer(number, 64)
        recorder.begin_wait(transfer)  # 9, 11
        recorder.end_wait(transfer)  # 10, 12
    recorder.close()
    return log, stopwatch.num_marks


def launch(number: int, at_ns: int, link: int = 0) -> Event:
    return Event("cudaLaunchKernel", at_ns, 5, "cuda_runtime", number, link)


def kernel(what: str, lasts_ns: int, number: int, link: int = 0, **meta: object) -> Event:
    at_ns = 90_000 + 1000 * number
    return Event(what, at_ns, lasts_ns, "kernel", number, link, meta=dict(meta))


def message(name: str, of: str = GROUP) -> dict[str, object]:
    group, _, number = of.partition("#")
    return {
        "Collective name": name,
        "Process Group Description": group,
        "Process Group Name": number,
    }


def step_and(log: StepLog, num_marks: int, events: list[Event], *, is_device: bool) -> Trace:
    step = TracedStep(
        log=log,
        trace="trace-0-0.json.gz",
        num_marks=num_marks,
        first_transfer=1,
        is_device=is_device,
    )
    return Trace(step, events)


def trace(*more: Event) -> Trace:
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
    return step_and(log, num_marks, events, is_device=True)


def test_kernels_go_to_the_operator_that_launched_them():
    trace_records = [r for r in trace().records() if isinstance(r, TraceRecord)]
    assert [(r.phase, r.duration_ns, r.num_kernels) for r in trace_records] == [
        (Phase.FORWARD, 40, 1),
        (Phase.BACKWARD, 41 + 59, 4),
    ]
    assert {(r.step, r.layer, r.shape) for r in trace_records} == {(5, 3, (TOKENS, IN, OUT))}


def test_transfers_take_the_time_of_their_kernels_in_order():
    name = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"
    traced = trace(
        kernel(name, 70, 8, **message("_reduce_scatter_base")),
        launch(8, 11_500),
        kernel(name, 60, 7, **message("_reduce_scatter_base")),
        launch(7, 9_500),
    )
    calls = [r for r in traced.records() if isinstance(r, CollectiveRecord)]
    assert [(r.sequence, r.duration_ns, r.is_bound, r.nbytes) for r in calls] == [
        (0, 60, False, 64),
        (1, 70, False, 64),
    ]


def step_of(*events: Event, **kind: Any) -> Trace:
    """A step of one operator, and what was launched in it."""
    log, num_marks = played(**kind)
    marks = [Event(MARK, 1000 * n, 1, number=900 + n) for n in range(1, num_marks + 1)]
    return step_and(log, num_marks, [*marks, *events], is_device=True)


@pytest.mark.parametrize("call", LAUNCHES)
@given(numbers=st.permutations((20, 30, 31)))
def test_numbers_of_launches_are_not_those_of_operations(call, numbers):
    first, second, third = numbers
    traced = step_of(
        Event("aten::linear", 2100, 400, number=20),
        Event("Optimizer.step", 2200, 90, "user_annotation", 40),
        Event(call, 2210, 5, "cuda_driver", first, 20),
        kernel("nvjet_tst_128x64", 40, first, 20),
        Event("Optimizer.step", 90_000, 99_999, "gpu_user_annotation", 40, 40),
        Event("aten::mm", 6100, 100, number=30, dims=[[TOKENS, OUT], [OUT, IN]]),
        Event(call, 6150, 5, "cuda_driver", second, 30),
        kernel("nvjet_tst_64x64", 41, second, 30),
        Event("aten::mm", 6300, 100, number=31, dims=[[OUT, TOKENS], [TOKENS, IN]]),
        Event(call, 6350, 5, "cuda_driver", third, 31),
        kernel("nvjet_tst_64x64", 50, third, 31),
    )
    assert times(traced) == {
        Phase.FORWARD: (40, 1),
        Phase.BACKWARD: (41 + 50, 2),
    }


def node(number: int, at_ns: int, *kernels: Event) -> list[Event]:
    """A node of autograd of a library that records none of its own calls."""
    launches = [launch(k.number, at_ns + 10 * (n + 1), number) for n, k in enumerate(kernels)]
    return [Event("_TeLinearBackward", at_ns, 500, number=number), *launches, *kernels]


def times(traced: TracedStep) -> dict[Phase, tuple[int, int]]:
    records = [r for r in traced.records() if isinstance(r, TraceRecord)]
    assert traced.remarks() == ["trace"]
    return {r.phase: (r.duration_ns, r.num_kernels) for r in records}


NORM = "void transformer_engine::normalization::rmsnorm_bwd_tuned_kernel<...>"


def test_h2_both_products_of_one_node_and_the_norm_behind_them():
    traced = step_of(
        *node(20, 2100, kernel("rmsnorm_fwd", 10, 1, 20), kernel("nvjet_fprop", 40, 2, 20)),
        *node(
            30,
            6100,
            kernel("nvjet_dgrad", 41, 3, 30),
            kernel("splitKreduce_kernel", 3, 4, 30),
            kernel("cast_transpose", 5, 5, 30),
            kernel("nvjet_wgrad", 50, 6, 30),
            kernel("splitKreduce_kernel", 2, 7, 30),
            kernel(NORM, 20, 8, 30),
            kernel(NORM.replace("tuned", "finalize_tuned"), 4, 9, 30),
        ),
    )
    assert times(traced) == {
        Phase.FORWARD: (50, 2),
        Phase.BACKWARD: (41 + 3 + 20 + 4 + 5 + 50 + 2, 7),
    }


def test_h2_a_weight_gradient_that_is_put_off_leaves_the_pass_whole():
    traced = step_of(*node(30, 6100, kernel("nvjet_dgrad", 41, 3, 30), kernel(NORM, 20, 4, 30)))
    assert times(traced) == {Phase.BACKWARD: (61, 2)}


EXPERTS = {
    "kind": OperatorKind.GROUPED_LINEAR,
    "shapes": ((TOKENS, IN), (TOKENS, OUT), 2, ()),
}


def products(first: int, at_ns: int, lasts_ns: int, link: int) -> list[Event]:
    """Two products at once, half of the second behind the first."""
    return [
        Event("nvjet", at_ns + n * lasts_ns // 2, lasts_ns, "kernel", first + n, link)
        for n in range(2)
    ]


def test_h3_products_on_two_streams_count_once():
    traced = step_of(
        *node(20, 2100, *products(1, 90_000, 40, 20)),
        *node(30, 6100, *products(3, 91_000, 60, 30), *products(5, 92_000, 80, 30)),
        **EXPERTS,
    )
    assert times(traced) == {
        Phase.FORWARD: (60, 2),
        Phase.BACKWARD: (90 + 120, 4),
    }


def test_h2_two_products_of_inputs_are_not_halved():
    traced = step_of(
        *node(20, 2100, *products(1, 90_000, 40, 20)),
        *node(30, 6100, *products(3, 91_000, 60, 30)),
        **EXPERTS,
    )
    assert times(traced) == {Phase.FORWARD: (60, 2), Phase.BACKWARD: (90, 2)}


def test_copies_of_one_call_are_one_transfer_of_copy_engines():
    def copied(number: int, at_ns: int) -> list[Event]:
        call = Event("record_param_comms", at_ns, 100, number=number)
        call.meta = message("_reduce_scatter_base")
        copies = [
            Event(
                "Memcpy PtoP (Device -> Device)", 50 * at_ns + 20 * n, 30, "gpu_memcpy", k, number
            )
            for n, k in enumerate((number + 1, number + 2, number + 3))
        ]
        launches = [launch(copy.number, at_ns + 10, number) for copy in copies]
        return [call, *launches, *copies]

    traced = trace(*copied(70, 9_200), *copied(80, 11_200))
    calls = [r for r in traced.records() if isinstance(r, CollectiveRecord)]
    assert [r.duration_ns for r in calls] == [70, 70]


def test_a_kernel_too_few_leaves_the_transfers_of_its_group_out():
    traced = trace(
        kernel("ncclDevKernel_ReduceScatter", 60, 7, **message("_reduce_scatter_base")),
        launch(7, 9_500),
    )
    assert not any(isinstance(r, CollectiveRecord) for r in traced.records())


def long_trace(num_kernels: int) -> Trace:
    """A kernel below each product, and what a trace of a device has besides; 400 transfers."""
    log, num_marks = played()
    events = [Event(MARK, 1000 * n, 1, number=9_000_000 + n) for n in range(1, num_marks + 1)]
    for n in range(1, num_kernels + 1):
        at_ns = 12_000 + 10 * n
        name = "aten::mm" if n % (num_kernels // 400) else "record_param_comms"
        kernel_name = "nvjet" if name == "aten::mm" else "ncclDevKernel_ReduceScatter"
        meta = message("_reduce_scatter_base") if name != "aten::mm" else {}
        events += [
            Event("aten::linear", at_ns, 9, number=2 * n),
            Event(name, at_ns + 1, 7, number=2 * n + 1, dims=[[8, 16], [16, 4]], meta=meta),
            Event("cudaStreamIsCapturing", at_ns + 2, 1, "cuda_runtime", 5_000_000 + n, 2 * n + 1),
            launch(n, at_ns + 3, 2 * n + 1),
            Event(kernel_name, at_ns + 50, 5, "kernel", n, 2 * n + 1, meta=meta),
        ]
    return step_and(log, num_marks, events, is_device=True)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """It goes through all that the tests hold, at a time of its own."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("no_collector")
def test_reading_costs_as_much_for_each_event_however_many_there_are():
    def cost_s(num_kernels: int) -> float:
        traced = long_trace(num_kernels)
        begin_s = time.thread_time()
        traced.records()
        return (time.thread_time() - begin_s) / num_kernels

    costs_s = [cost_s(number) for number in (4_000, 32_000)]
    assert costs_s[1] < 3 * costs_s[0]


NODE = "_LayerNormLinearBackward"
UPDATE = "void transformer_engine::delayed_scaling_recipe::kernel_bulk<amax_and_scale_update>(...)"


def test_reductions_of_amax_are_transfers_and_in_no_operator():
    """In the backward node of the first module of an autocast, behind both products.

    (Transformer Engine d0067d0, pytorch/quantization.py, reduce_and_update_fp8_tensors.)
    """
    call = Event("record_param_comms", 7500, 100, number=31, meta=message("allreduce", AMAX))
    name = "ncclDevKernel_AllReduce_Max_f32_RING_LL"
    traced = step_of(
        *(Event(NODE, 6100, 2500, number=30), call),
        *(launch(1, 6200, 30), kernel("nvjet_dgrad", 40, 1, 30)),
        *(launch(2, 6300, 30), kernel("nvjet_wgrad", 50, 2, 30)),
        *(launch(3, 7520, 31), kernel(name, 900, 3, 31, **message("allreduce", AMAX))),
        *(launch(4, 8600, 30), kernel(UPDATE, 3, 4, 30)),
        has_amax=True,
    )
    records = traced.records()
    assert [(r.phase, r.duration_ns) for r in records if isinstance(r, TraceRecord)] == [
        (Phase.BACKWARD, 40 + 53),
    ]
    (reduced,) = (r for r in records if isinstance(r, CollectiveRecord))
    assert (reduced.collective, reduced.role) == (Collective.ALL_REDUCE, GroupRole.OTHER)
    assert (reduced.nbytes, reduced.duration_ns) == (36, 900)


LATE = "_RegisterDelayedWgradForExpertsBackward"


def delayed_weight_products(node: str, at_ns: int, *, count: int = 2) -> Trace:
    """Two experts, whose products of the weights come where ``node`` runs."""
    return step_of(
        *(Event("_GroupedLinear", 2100, 400, number=20), launch(1, 2200, 20), launch(2, 2210, 20)),
        *(kernel("nvjet_fprop", 40, 1, 20), kernel("nvjet_fprop", 41, 2, 20)),
        *(Event(NODE, 6100, 400, number=30), launch(3, 6200, 30), launch(4, 6210, 30)),
        *(kernel("nvjet_dgrad", 50, 3, 30), kernel("nvjet_dgrad", 51, 4, 30)),
        Event(node, at_ns, 300, number=40),
        *(launch(5 + n, at_ns + 10 * n, 40) for n in range(count)),
        *(kernel("nvjet_wgrad", 60 + n, 5 + n, 40) for n in range(count)),
        *(launch(9, 4500, 0), kernel("vectorized_add", 7, 9)),
        **EXPERTS,
    )


@pytest.mark.parametrize("at_ns", [6600, 7200, 8500])
def test_gradients_that_were_put_off_are_the_linears_own(at_ns):
    """Below Megatron's node, with an operator open or none: no operator's or that one's before."""
    traced = delayed_weight_products(LATE, at_ns)
    trace_records = [r for r in traced.records() if isinstance(r, TraceRecord)]
    assert [(r.phase, r.duration_ns, r.num_kernels) for r in trace_records] == [
        (Phase.FORWARD, 81, 2),
        (Phase.BACKWARD, 101 + 121, 4),
    ]
    assert traced.remarks() == ["trace"]


def test_gradients_that_a_users_loop_puts_off_are_left_out_and_said():
    """Their order is the user's: without them a pass is not whole."""
    traced = delayed_weight_products("backward_dw", 8500)
    trace_records = [r for r in traced.records() if isinstance(r, TraceRecord)]
    assert [(r.phase, r.duration_ns) for r in trace_records] == [
        (Phase.FORWARD, 81),
    ]
    assert traced.remarks() == [
        "trace",
        "trace: 40 % of the time of kernels in passes belongs to no operator",
    ]


def test_other_products_than_were_put_off_are_left_out_and_their_share_is_said():
    traced = delayed_weight_products(LATE, 7200, count=3)
    trace_records = [r for r in traced.records() if isinstance(r, TraceRecord)]
    assert [(r.phase, r.duration_ns) for r in trace_records] == [
        (Phase.FORWARD, 81),
        (Phase.BACKWARD, 101),
    ]
    share = 100 * (60 + 61 + 62) / (81 + 101 + 60 + 61 + 62)
    assert (
        traced.remarks()[1]
        == f"trace: {share:.0f} % of the time of kernels in passes belongs to no operator"
    )


@pytest.mark.parametrize(
    ("call", "category"),
    [
        ("cudaLaunchKernel", "cuda_runtime"),
        ("cuLaunchKernelEx", "cuda_driver"),
        ("hipExtModuleLaunchKernel", "cuda_runtime"),
        ("urEnqueueKernelLaunch", "xpu_runtime"),
        ("zeCommandListAppendLaunchKernel", "xpu_driver"),
    ],
)
def test_a_kernel_is_of_the_operation_around_its_launch_on_every_device(call, category):
    """On XPU the call was taken for an operation: the kernel then belonged to none."""
    events = [
        Event("aten::mm", 0, 50, number=1),
        Event(call, 10, 5, kind=category, number=7, link=1),
        Event("gemm_kernel", 100, 30, kind="kernel", number=7),
    ]
    (work,) = work_of(from_chrome(event.chrome() for event in events))
    assert (work.call, work.launched_ns, work.is_product) == (1, 10, True)
