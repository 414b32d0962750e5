"""Profiler traces of Transformer Engine's layers: one operation, and kernels below it.

Its products come from a library that records no function, so that all kernels of an autograd node
are directly below the node.  The kernels are those of a stand-in for a device, with a device's
names and planted times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forerun.calib.records.kineto_trace import CPU_OP, KERNEL, TraceEvent

NAMES = {
    "mm": "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT",
    "addmm": "nvjet_hss_128x256_64x4_2x1_v_bz_coopA_NTN",
    "roll": "userbuffers_fp16_sum_inplace_gpu_rr_rs_oop(int, int, int, int, int, int, void**)",
    "sum": "void transformer_engine::reduce_bf16_cuda<2>(void*, void*, int, int)",
    "native_layer_norm": "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<...>",
    "native_layer_norm_backward": (
        "void transformer_engine::normalization::rmsnorm_bwd_tuned_kernel<...>"
    ),
}
"""Kernel that the library launches for each operator of the stand-in."""


def kernel_name(op: str) -> str:
    """Return a device's name for an operator's kernel."""
    return NAMES.get(op, f"void at::native::vectorized_elementwise_kernel<{op}>")


def node_events(
    node: str, kernels: Sequence[Mapping[str, Any]], *, at_ns: int, number: int
) -> list[TraceEvent]:
    """Return the events of a node that launches ``kernels`` (rows of a device's truth) in order."""
    host = TraceEvent(
        name=node, category=CPU_OP, start_ns=at_ns, duration_ns=len(kernels) * 10 + 10, thread=1,
        number=number,
    )  # fmt: skip
    return [host, *_launches(host, kernels)]


def _launches(host: TraceEvent, kernels: Iterable[Mapping[str, Any]]) -> Iterable[TraceEvent]:
    for place, row in enumerate(kernels):
        correlation = host.number * 1000 + place
        yield TraceEvent(
            name="cudaLaunchKernelExC", category="cuda_runtime", duration_ns=5, thread=1,
            start_ns=host.start_ns + 10 * place + 1, link=host.number, correlation=correlation,
        )  # fmt: skip
        begin_ns, end_ns = round(row["begin_s"] * 1e9), round(row["end_s"] * 1e9)
        yield TraceEvent(
            name=kernel_name(row["op"]), category=KERNEL, start_ns=begin_ns, link=host.number,
            duration_ns=end_ns - begin_ns, correlation=correlation,
        )  # fmt: skip
