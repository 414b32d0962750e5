"""Tables out of traces: those of real devices where they are at hand, and cut-outs made by code."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.errors import ConfigError, RecordError
from forerun.calib.importers.kineto import UNNAMED, WORLD_TAKEN, KinetoTables, kineto_tables
from forerun.calib.importers.kineto_origins import NODE
from forerun.calib.importers.rank_operations import WAITING, joined_ranks

TRACES = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"
NAMES = (
    "a100_16ranks_sendrecv",
    "a100_2ranks_nccl_metadata",
    "a100_8ranks_sendrecv",
    "a100_alexnet",
    "b200_8ranks_eager",
    "h100_qwen_forward",
    "mi250_toy_training",
    "mi300x_8ranks_training_recompute",
    "mi300x_qwen_forward",
    "v100_1rank_ns_resolution",
    "v100_2ranks_allreduce",
)


def tables(trace: object, device: str = "") -> KinetoTables:
    return kineto_tables(
        *(trace, "t.json"),  # type: ignore[arg-type]
        fabric="f",
        ranks_per_node=8,
        device=device,
    )


def event(category: str, name: str, ts: float, dur: float, thread: int = 1, **args: object) -> dict:
    place = {"pid": 0, "tid": thread}
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": args} | place


def product(ts: float, number: int, thread: int, sequence: int) -> dict:
    return event(
        *("cpu_op", "aten::mm", ts, 10, thread),
        **{"External id": number, "Sequence number": sequence, "Fwd thread id": 0},
        **{"Input Dims": [[64, 32], [32, 48]], "Input type": ["c10::BFloat16"] * 2},
    )


def test_h3_kernels_at_once_on_two_streams_count_once():
    """Their sum before: 60 us."""
    events = [
        product(0, 1, 1, 5),
        event("kernel", "gemm", 1000, 30, 7, **{"External id": 1}),
        event("kernel", "gemm", 1010, 30, 8, **{"External id": 1}),
        product(100, 2, 1, 6),
        event("kernel", "gemm", 1100, 30, 7, **{"External id": 2}),
        event("kernel", "splitKreduce", 1140, 5, 7, **{"External id": 2}),
    ]
    times_s = tables({"traceEvents": events}).operators["time_s"]
    assert list(times_s) == pytest.approx([40e-6, 35e-6])


def test_recomputed_products_have_rows_of_their_own_and_are_not_in_the_backward():
    back = {"Sequence number": 5, "Fwd thread id": 1}
    events = [
        product(0, 1, 1, 5),
        event("kernel", "gemm", 1000, 30, 7, **{"External id": 1}),
        event("cpu_op", f"{NODE}MmBackward0", 100, 90, 2, **back, **{"External id": 2}),
        event("cpu_op", "MmBackward0", 101, 80, 2, **back, **{"External id": 3}),
        product(102, 4, 2, 1),
        event("kernel", "gemm", 1100, 31, 7, **{"External id": 4}),
        event("cpu_op", "aten::mm", 120, 10, 2, **{"External id": 5}),
        event("cpu_op", "aten::mm", 140, 10, 2, **{"External id": 6}),
        event("kernel", "dgrad", 1200, 40, 7, **{"External id": 5}),
        event("kernel", "wgrad", 1300, 45, 7, **{"External id": 6}),
    ]
    rows = tables({"traceEvents": events}).operators
    assert dict(zip(rows["phase"], (rows["time_s"] * 1e6).round(6), strict=True)) == {
        "forward": 30,
        "recompute": 31,
        "backward": 85,
    }


def old_gather(**world: object) -> dict:
    number = {"External id": 1}
    shapes = {"Input Dims": [[2, 500]], "Input type": ["float"]}
    events = [
        event("cpu_op", "c10d::_allgather_base_", 0, 30, **number),
        event("cpu_op", "record_param_comms", 1, 20, **{"External id": 2}),
        event("user_annotation", "nccl:_all_gather_base", 2, 10, **{"External id": 3}, **shapes),
        event("cuda_runtime", "launch", 3, 1, correlation=9),
        event("kernel", "ncclKernel_AllGather_RING_LL(x)", 50, 40, 7, correlation=9),
    ]
    return {"traceEvents": events} | world


def test_an_old_transfer_has_the_size_of_its_tensor_and_a_flag_for_its_group():
    trace = old_gather(distributedInfo={"world_size": 4})
    (row,) = tables(trace, device="A100").collectives.to_dict("records")
    assert (row["collective"], row["nbytes"], row["num_ranks"]) == ("all_gather", 4 * 4000, 4)
    assert row["flag"] == WORLD_TAKEN and row["time_s"] == pytest.approx(40e-6)


def reduces(rank: int | None, arrivals_us: list[int], num_ranks: int, took_us: int) -> dict:
    """One rank's trace of all-reduces, which end together ``took_us`` after the last arrival."""
    details = {"Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20}
    details |= {"Group size": num_ranks, "dtype": "BFloat16", "Process Group Name": "0"}
    kernels = [
        event(
            "kernel", "ncclDevKernel_AllReduce_Sum", 1e5 * n - late_us, late_us + took_us, **details
        )
        for n, late_us in enumerate(arrivals_us, start=1)
    ]
    world = {"world_size": num_ranks} | ({} if rank is None else {"rank": rank})
    listed = [{"id": 0, "name": "H100"}]
    return {"traceEvents": kernels, "deviceProperties": listed, "distributedInfo": world}


@settings(deadline=None, max_examples=40)
@given(data=st.data(), num_ranks=st.integers(2, 5), took_us=st.integers(5, 500))
def test_only_the_traces_of_all_ranks_tell_a_transfer_from_waiting(
    data: st.DataObject, num_ranks: int, took_us: int
) -> None:
    """The last rank to arrive waits for none. Any fewer traces have a flag on each row."""
    late_us = st.lists(st.integers(0, 20_000), min_size=num_ranks, max_size=num_ranks)
    waits_us = [
        [one - min(each) for one in each] for each in data.draw(st.lists(late_us, min_size=1))
    ]
    named = data.draw(st.lists(st.sampled_from(range(num_ranks)), unique=True, min_size=1))
    is_numbered = data.draw(st.booleans())
    traces = [
        reduces(
            rank if is_numbered else None, [each[rank] for each in waits_us], num_ranks, took_us
        )
        for rank in named
    ]
    rows, notes = joined_ranks([tables(trace).collectives for trace in traces], "traces")
    is_whole = is_numbered and len(named) == num_ranks
    assert set(rows["flag"]) == ({""} if is_whole else {WAITING})
    assert bool(notes) is not is_whole
    if is_whole:
        assert list(rows["time_s"]) == pytest.approx([took_us * 1e-6] * len(waits_us))
    else:
        assert notes[0].startswith("1 of 1 communicators lack the traces of some ranks, so that")


def test_no_number_of_ranks_is_made_up():
    kineto_tables = tables(old_gather())
    assert not len(kineto_tables.collectives) and "no transfer with a size" in kineto_tables.refusal
    assert kineto_tables.shares is not None and kineto_tables.shares.num_transfers == 1


def test_a_trace_with_nothing_for_us_says_what_it_lacks():
    events = [event("cpu_op", "aten::mm", 0, 5, **{"External id": 1})]
    assert "record_shapes=True" in tables({"traceEvents": events}).refusal
    with pytest.raises(RecordError, match="not a Chrome trace"):
        tables({"traceEvents": []})


@pytest.fixture(scope="module", params=NAMES)
def real(request: pytest.FixtureRequest) -> tuple[str, KinetoTables]:
    path = TRACES / f"{request.param}.json.gz"
    if not path.exists():
        pytest.skip("the traces are not here")
    with gzip.open(path) as file:
        return request.param, tables(json.load(file))


@pytest.mark.slow
def test_of_a_real_trace_every_kernel_that_was_launched_in_it_has_an_operator(real):
    name, result = real
    assert result.shares is not None, name
    assert result.shares.inside_frac >= 0.99
    assert result.refusal or len(result.operators) + len(result.collectives)


@pytest.mark.slow
def test_every_node_of_a_real_trace_has_its_operation_or_adds_gradients_up(real):
    _, result = real
    assert result.shares.num_linked + result.shares.num_accumulating == result.shares.num_nodes


@pytest.mark.slow
def test_kernels_of_a_real_trace_sum_up_to_its_kernel_time(real):
    _, result = real
    assert result.kernels["time_s"].sum() == pytest.approx(result.shares.kernel_time_s)
    recomputed = "recompute" in result.shares.phase_fracs
    assert recomputed == ("recompute" in real[0])


def launched(runtime: str, call: str = "cudaLaunchKernel", kernel: str = "kernel") -> list[dict]:
    return [
        product(0, 1, 1, 5),
        event(runtime, call, 3, 2, correlation=7),
        event(kernel, "gemm", 20, 30, 7, correlation=7, device=1),
    ]


@pytest.mark.parametrize("listed", [None, [], [{}], [{"name": ""}], {"name": "x"}, [None]])
@pytest.mark.parametrize(
    ("runtime", "call", "name"),
    [
        ("cuda_runtime", "cudaLaunchKernel", "unknown cuda device"),
        ("cuda_runtime", "hipLaunchKernel", "unknown hip device"),
        ("xpu_runtime", "urEnqueueKernelLaunch", "unknown xpu device"),
        ("cpu_op", "aten::add", "unknown device"),
    ],
)
def test_kernels_of_a_device_without_a_name_are_flagged(listed, runtime, call, name):
    """Before: their times were under "cpu" and without a flag."""
    events = launched(runtime, call)
    if runtime == "cpu_op":
        events[2]["args"]["External id"] = 1
    result = tables({"traceEvents": events, "deviceProperties": listed})
    assert list(result.operators["device"]) == list(result.kernels["device"]) == [name]
    assert list(result.operators["flag"]) == [result.flag] == [UNNAMED]
    named = tables({"traceEvents": events, "deviceProperties": listed}, device="MI300X")
    assert list(named.operators["device"]) == ["MI300X"] and list(named.operators["flag"]) == [""]
    assert list(result.operators["time_s"]) == list(named.operators["time_s"]) == [30e-6]


def test_the_listed_device_that_ran_the_kernels_gives_the_name():
    listed = [{"id": 0, "name": "T4"}, {"id": 1, "name": "H100"}]
    result = tables({"traceEvents": launched("cuda_runtime"), "deviceProperties": listed})
    assert list(result.operators["device"]) == ["H100"]


@pytest.mark.parametrize(
    ("trace", "kind"),
    [
        ({"traceEvents": launched("mtia_runtime", kernel="mtia_ccp_events")}, "mtia"),
        ({"traceEvents": launched("cuda_runtime")[:2]}, "cuda"),
        ({"traceEvents": launched("xpu_driver", kernel="gpu_memcpy")}, "xpu"),
        ({"traceEvents": launched("cpu_op", kernel="hpu_op")}, "hpu"),
        ({"traceEvents": launched("privateuse1_runtime")[:2]}, "privateuse1"),
        ({"traceEvents": launched("cpu_op")[:2], "deviceProperties": [{"name": "A100"}]}, "A100"),
        (
            {
                "traceEvents": launched("cpu_op")[:2],
                "distributedInfo": {"backend": "cpu:gloo,xpu:xccl"},
            },
            "accelerator",
        ),
        ({"traceEvents": launched("user_annotation", "nccl:all_to_all")[:2]}, "accelerator"),
    ],
)
def test_times_of_the_host_are_not_those_of_an_accelerator(trace, kind):
    result = tables(trace)
    assert not len(result.operators) and not len(tables(trace, device="A100").operators)
    assert result.refusal.startswith(
        f"t.json has no events of category kernel of its {kind}; record its activity"
    )
    host = tables(trace, device="cpu")
    assert set(host.operators["device"]) == {"cpu"} and not host.refusal


def test_only_a_trace_of_the_host_alone_is_of_the_cpu():
    assert list(tables({"traceEvents": [product(0, 1, 1, 5)]}).operators["device"]) == ["cpu"]
    with pytest.raises(ConfigError, match=r"--device CPU runs no kernels.*; give the name"):
        tables({"traceEvents": launched("cuda_runtime")}, device="CPU")
