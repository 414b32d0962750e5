"""Traces made by hand: which operator, phase and transfer a kernel belongs to is known of each."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import count

import pytest

from forerun.calib.importers.kineto_origins import NODE, KernelOrigin, Missing, origins
from forerun.calib.records.chrome_trace import from_chrome
from forerun.calib.workload.collectives import Collective
from forerun.calib.workload.operators import Phase

MAIN, ENGINE, DEVICE = 1, 2, 7


class Trace:
    """Events in the order of the calls; each kernel runs long after its launch."""

    def __init__(self) -> None:
        self.events: list[dict] = []
        self._numbers = count(1)
        self._now = 0.0

    def put(self, category: str, name: str, thread: int, dur: float, **args: object) -> dict:
        event = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread}
        event |= {"ts": self._now, "dur": dur, "args": args}
        self.events.append(event)
        return event

    def inside(self, name: str, thread: int = MAIN, category: str = "cpu_op", **args: object):
        trace = self

        class _Span:
            def __enter__(self) -> None:
                number = next(trace._numbers)
                self.event = trace.put(category, name, thread, 0, **{"External id": number}, **args)
                trace._now += 1

            def __exit__(self, *_: object) -> None:
                trace._now += 1
                self.event["dur"] = trace._now - self.event["ts"] - 0.5

        return _Span()

    def launch(self, kernel: str, thread: int = MAIN, dur: float = 10.0, **args: object) -> None:
        number = 1000 + next(self._numbers)
        self.put("cuda_runtime", "cudaLaunchKernel", thread, 0.5, correlation=number)
        self.put("kernel", kernel, DEVICE, dur, correlation=number, **args)["ts"] += 5000
        self._now += 1

    def origins(self) -> list[KernelOrigin]:
        return origins(from_chrome(self.events))[0]


def node(trace: Trace, name: str, number: int) -> ExitStack:
    """A node on the engine's thread, and the function of the same name that it calls."""
    stack = ExitStack()
    for begin in (NODE, ""):
        stack.enter_context(trace.inside(f"{begin}{name}", ENGINE, **sequence(number, 1)))
    return stack


def sequence(number: int, thread: int = 0) -> dict:
    return {"Sequence number": number, "Fwd thread id": thread}


def checkpointed() -> Trace:
    """A convolution and a relu under a checkpoint: the relu's node runs both again.

    The engine's thread counts from 4 as well, where the main thread has the convolution.
    """
    trace = Trace()
    with trace.inside("aten::conv2d", **sequence(4)):
        trace.launch("conv")
    with trace.inside("aten::add_", **sequence(5)):
        trace.launch("count")
    with trace.inside("aten::relu", **sequence(5)):
        trace.launch("relu")
    with node(trace, "ReluBackward0", 5):
        with trace.inside("aten::conv2d", ENGINE, **sequence(3)):
            trace.launch("conv again", ENGINE)
        with trace.inside("aten::relu", ENGINE, **sequence(4)):
            trace.launch("relu again", ENGINE)
        with trace.inside("aten::threshold_backward", ENGINE):
            trace.launch("relu back", ENGINE)
    with node(trace, "ConvolutionBackward0", 4):
        trace.launch("conv back", ENGINE)
    return trace


def test_a_checkpoint_runs_forward_inside_backward_and_nodes_find_their_operation():
    result = {o.kernel.name: (o.phase, o.operator) for o in checkpointed().origins()}
    assert result == {
        "conv": (Phase.FORWARD, "aten::conv2d"),
        "count": (Phase.FORWARD, "aten::add_"),
        "relu": (Phase.FORWARD, "aten::relu"),
        "conv again": (Phase.RECOMPUTE, "aten::conv2d"),
        "relu again": (Phase.RECOMPUTE, "aten::relu"),
        "relu back": (Phase.BACKWARD, "aten::relu"),
        "conv back": (Phase.BACKWARD, "aten::conv2d"),
    }


def test_a_reentrant_checkpoint_has_nodes_inside_its_node():
    trace = Trace()
    with trace.inside("CheckpointFunction", **sequence(1)):
        trace.launch("mm")
    with node(trace, "CheckpointFunctionBackward", 1):
        with trace.inside("aten::mm", ENGINE, **sequence(9)):
            trace.launch("mm again", ENGINE)
        with trace.inside(f"{NODE}MmBackward0", ENGINE, **sequence(9, 2)):
            trace.launch("mm back", ENGINE)
    result = {o.kernel.name: (o.phase, o.operator) for o in trace.origins()}
    assert result["mm again"] == (Phase.RECOMPUTE, "aten::mm")
    assert result["mm back"] == (Phase.BACKWARD, "aten::mm")


def test_ranges_of_the_user_tell_the_optimizer_from_the_passes():
    trace = Trace()
    with trace.inside("Optimizer.step#Adam.step", category="user_annotation"):
        with trace.inside("aten::_foreach_add_"):
            trace.launch("foreach")
        trace.launch("fused adam")
    with trace.inside("## forward ##", category="user_annotation"), trace.inside("aten::embedding"):
        trace.launch("embedding")
    with trace.inside("aten::sort"):
        trace.launch("sort")
    with trace.inside(f"{NODE}torch::autograd::AccumulateGrad", ENGINE):
        trace.launch("add", ENGINE)
    result = {o.kernel.name: (o.phase, o.operator) for o in trace.origins()}
    assert result == {
        "foreach": (Phase.STEP, "Optimizer.step#Adam.step"),
        "fused adam": (Phase.STEP, "Optimizer.step#Adam.step"),
        "embedding": (Phase.FORWARD, "aten::embedding"),
        "sort": (None, "aten::sort"),
        "add": (Phase.BACKWARD, "torch::autograd::AccumulateGrad"),
    }


def test_a_trace_without_nodes_is_of_a_forward_pass():
    trace = Trace()
    with trace.inside("aten::mm"):
        trace.launch("gemm")
    assert [o.phase for o in trace.origins()] == [Phase.FORWARD]


def test_what_is_not_known_has_a_cause():
    trace = Trace()
    trace.put("kernel", "early", DEVICE, 5, correlation=3)
    with trace.inside("aten::mm"):
        trace.launch("gemm")
    trace.launch("bare")
    trace.put("kernel", "lost", DEVICE, 5, correlation=99_999)
    assert {o.kernel.name: o.missing for o in trace.origins()} == {
        "early": Missing.BEFORE,
        "gemm": None,
        "bare": Missing.OPERATOR,
        "lost": Missing.LAUNCH,
    }


@pytest.mark.parametrize(
    ("kernel", "around", "expected"),
    [
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)", "nccl:all_to_all", Collective.ALL_TO_ALL),
        ("ncclDevKernel_Generic(x)", "nccl:_reduce_scatter_base", Collective.REDUCE_SCATTER),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(x)", "", Collective.ALL_REDUCE),
        ("rcclGenericKernel(x)", "", Collective.OTHER),
        ("void multimem_all_reduce_kernel<c10::BFloat16, 16>(x)", "", Collective.ALL_REDUCE),
    ],
)
def test_a_transfer_is_named_by_what_is_around_it_else_by_its_kernel(kernel, around, expected):
    trace = Trace()
    with trace.inside("record_param_comms"):
        if around:
            with trace.inside(around, category="user_annotation"):
                trace.launch(kernel)
        else:
            trace.launch(kernel)
    (kernel_origin,) = trace.origins()
    assert kernel_origin.collective is expected


def test_a_product_inside_a_range_of_transfers_is_none():
    trace = Trace()
    with trace.inside("record_param_comms"):
        trace.launch("void at::native::reduce_kernel<512, 1>()")
    assert trace.origins()[0].collective is None
