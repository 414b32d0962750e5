"""Traces made by hand in Kineto's format, where it is known what was launched by whom."""

from __future__ import annotations

import pytest

from forerun.calib.records.chrome_trace import from_chrome
from forerun.calib.records.kineto_trace import (
    TracedWork,
    collective_named,
    kernel_collective,
    num_products,
    products_of,
    work_of,
)
from forerun.calib.workload.collectives import Collective

HOST, LAUNCH_US = 7, 2.0


def host(name: str, ts: float, dur: float, number: int, **args: object) -> dict:
    args["External id"] = number
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "tid": HOST,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def launch(ts: float, correlation: int) -> dict:
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "tid": HOST,
        "ts": ts,
        "dur": LAUNCH_US,
        "args": {"correlation": correlation},
    }


def kernel(
    name: str, ts: float, dur: float, correlation: int, link: int = 0, **args: object
) -> dict:
    args |= {"correlation": correlation, "External id": link, "stream": 7}
    return {"ph": "X", "cat": "kernel", "name": name, "tid": 7, "ts": ts, "dur": dur, "args": args}


def linear_backward(*, has_links: bool) -> list[dict]:
    """Input gradient of 40 + 5 us, weight gradient of 60 us, bias of 3 us; host times from 100."""
    number = 3 if has_links else 0
    return [
        host("autograd::engine::evaluate_function: AddmmBackward0", 100, 60, 1),
        host("AddmmBackward0", 101, 58, 2),
        host("aten::mm", 102, 10, 3),
        launch(103, 11),
        launch(106, 12),
        host("aten::t", 113, 1, 4),
        host("aten::mm", 115, 10, 5),
        launch(116, 13),
        host("aten::sum", 130, 10, 6),
        launch(132, 14),
        kernel("ampere_bf16_s16816gemm_bf16_128x128", 1000, 40, 11, number),
        kernel("void splitKreduce_kernel<32, 16>(float*)", 1040, 5, 12, number),
        kernel("nvjet_tst_192x208_64x4", 1050, 60, 13, 5 if has_links else 0),
        kernel("void at::native::reduce_kernel<512, 1>()", 1120, 3, 14, 6 if has_links else 0),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "tid": 7, "ts": 103, "id": 11},
    ]


@pytest.mark.parametrize("has_links", [True, False])
def test_kernels_find_their_calls_by_link_or_by_nesting(has_links):
    work = work_of(from_chrome(linear_backward(has_links=has_links)))
    assert [(w.duration_ns, w.launched_ns, w.call) for w in work] == [
        (40_000, 103_000, 3),
        (5_000, 106_000, 3),
        (60_000, 116_000, 5),
        (3_000, 132_000, 6),
    ]
    assert [w.is_product for w in work] == [True, False, True, False]


def product(duration_ns: int, call: int = 0) -> TracedWork:
    return TracedWork(
        name="gemm", start_ns=0, duration_ns=duration_ns, launched_ns=0, call=call, is_product=True
    )


def other(duration_ns: int) -> TracedWork:
    return TracedWork(name="copy", start_ns=0, duration_ns=duration_ns, launched_ns=0)


def test_a_product_takes_the_work_before_it_and_the_sum_of_its_parts():
    work = work_of(from_chrome(linear_backward(has_links=True)))
    parts = [[w.duration_ns for w in one] for one in products_of(work)]
    assert parts == [[40_000, 5_000], [60_000, 3_000]]


@pytest.mark.parametrize(
    ("work", "number"),
    [([], 0), ([other(3)], 0), ([product(3), other(1)], 1), ([product(1)] * 3, 3)],
)
def test_products_without_calls_of_their_own_count_each(work, number):
    assert num_products(work) == number


def test_a_kernel_of_nccl_tells_its_collective_and_group():
    group = {
        "Collective name": "_allgather_base",
        "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP",
        "Process Group Name": "3",
    }
    events = [
        host("record_param_comms", 10, 5, 1, **group),
        launch(12, 1),
        launch(13, 2),
        kernel("ncclDevKernel_AllGather_RING_LL", 20, 9, 1, 0, **group),
        kernel("ncclDevKernel_AllGather_RING_LL", 30, 9, 2, 1),
    ]
    first, second = work_of(from_chrome(events))
    assert first.message == second.message
    assert first.message is not None
    assert first.message.collective is Collective.ALL_GATHER
    assert first.message.group == "TENSOR_MODEL_PARALLEL_GROUP#3"


def test_on_a_host_the_outermost_operations_are_the_work():
    events = [
        host("autograd::engine::evaluate_function: MmBackward0", 0, 50, 1),
        host("aten::matmul", 1, 20, 2),
        host("aten::mm", 2, 18, 3),
        host("aten::add_", 30, 5, 4),
        host("c10d::allreduce_", 40, 5, 5),
        host("forerun", 45, 1, 6),
    ]
    work = work_of(from_chrome(events))
    assert [(w.name, w.duration_ns) for w in work] == [
        ("aten::matmul", 20_000),
        ("aten::add_", 5_000),
    ]


def test_a_library_with_gemm_in_its_name_makes_no_product():
    events = [launch(1, 1), kernel("fbgemm::permute_2D_data_kernel", 5, 1, 1)]
    assert [w.is_product for w in work_of(from_chrome(events))] == [False]


FLASH = "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<cute::tuple<...>>>>"


def test_attention_built_of_products_is_no_product():
    events = [launch(1, 1), kernel(FLASH, 5, 1, 1)]
    assert [w.is_product for w in work_of(from_chrome(events))] == [False]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kuserbuffers_pushsend(int*, int*, int4*)", Collective.OTHER),
        ("void userbuffers_fp16_sum_inplace_gpu_mc_ag<8>(int, int)", Collective.ALL_GATHER),
        ("void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int)", Collective.REDUCE_SCATTER),
        ("void userbuffers_fp16_sum_inplace_gpu_rr<8>(int, int)", Collective.ALL_REDUCE),
        ("void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(...)", Collective.ALL_TO_ALL),
        ("void deep_ep::internode::notify_dispatch<false, 4>(...)", Collective.ALL_TO_ALL),
        ("void deep_ep::legacy::layout::get_dispatch_layout<256>(...)", None),
        ("void hybrid_ep::dispatch_kernel<hybrid_ep::inter_node_group>", Collective.ALL_TO_ALL),
        ("void hybrid_ep::scan<256>(bool const*, tmp_state_t*)", None),
        ("nvshmemi_transfer_rma_kernel", Collective.OTHER),
        ("void nvshmem_all_to_all_vdev(...)", Collective.ALL_TO_ALL),
        ("void step_epilogue_kernel<float>(float*)", None),
    ],
)
def test_libraries_beside_nccl_transfer_by_their_names(name, expected):
    assert kernel_collective(name) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("allreduce", Collective.ALL_REDUCE),
        ("gloo:all_reduce", Collective.ALL_REDUCE),
        ("nccl:reduce_scatter_tensor_coalesced", Collective.REDUCE_SCATTER),
        ("all_to_allv", Collective.ALL_TO_ALL),
        ("nccl:recv 1<-0", Collective.RECV),
        ("nccl:coalesced", Collective.OTHER),
    ],
)
def test_collectives_are_known_by_all_of_their_names(name, expected):
    assert collective_named(name) is expected
