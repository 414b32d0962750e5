"""``forerun import``: a real profiler trace, and a log as nccl-tests prints it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pandas as pd
import pytest

from forerun.calib.importers.canonical_tables import read_table
from forerun.launch.cli import ExitCode, main

LOG = """\
# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 2097152 step: 2(factor) warmup iters: 5 iters: 20
#
# Using devices
#  Rank  0 Group  0 Pid   1001 on   worker-1 device  0 [0x8d] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1002 on   worker-1 device  1 [0x91] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid   1003 on   worker-2 device  0 [0x8d] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid   1004 on   worker-2 device  1 [0x91] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)
           0             0     float     sum      -1     0.21    0.00    0.00       0     0.20
     1048576        262144     float     sum      -1    40.00   26.21   39.32       0    41.00
     2097152        524288     float     sum      -1    64.00   32.77   49.15       0    65.00
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 44.2
#
# Collective test concluded: all_reduce_perf

# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807
# Collective test starting: sendrecv_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 2097152 step: 2(factor) warmup iters: 5 iters: 20
# Using devices
#  Rank  0 Group  0 Pid   1001 on   worker-1 device  0 [0x8d] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1002 on   worker-1 device  1 [0x91] NVIDIA H100 80GB HBM3
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time
     1048576        262144     float     sum      -1    10.00  104.86  104.86       0    10.10

# Collective test starting: gather_perf
#  Rank  0 Group  0 Pid   1001 on   worker-1 device  0 [0x8d] NVIDIA H100 80GB HBM3
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time
     1048576        262144     float    none       0    10.00  104.86  104.86       0    10.10
"""


def imported(
    capsys: pytest.CaptureFixture[str], source: str, *files: Path, out: Path, options: str = ""
) -> pd.DataFrame:
    argv = ["import", source, *map(str, files), "--out", str(out), *options.split()]
    assert main(argv) == ExitCode.ANSWER, capsys.readouterr().err
    return pd.read_parquet(out) if out.suffix == ".parquet" else pd.read_csv(out)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two forward and backward passes on the CPU, recorded by PyTorch's own profiler."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    generator = torch.Generator().manual_seed(0)
    norm, linear = torch.nn.LayerNorm(32), torch.nn.Linear(32, 48)
    x, q = (
        torch.randn(*shape, generator=generator, requires_grad=True)
        for shape in ((64, 32), (2, 4, 16, 8))
    )
    k = torch.randn(4, 16, 8, generator=generator, requires_grad=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profiler:
        for _ in range(2):
            loss = functional.gelu(linear(norm(x))).sum()
            loss = loss + functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum()
            loss = loss + functional.scaled_dot_product_attention(q, q, q).sum()
            loss = loss + torch.softmax(torch.bmm(k, k.transpose(1, 2)), -1).sum()
            loss.backward()
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    profiler.export_chrome_trace(str(path))
    return path


def test_a_real_trace_gives_operators_with_both_phases(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = imported(capsys, "kineto", trace, out=tmp_path / "ops.parquet")
    assert set(rows["device"]) == {"cpu"} and set(rows["element_nbytes"]) == {4}
    shapes = {
        "addmm": "64x32x48",
        "native_layer_norm": "64x32",
        "gelu": "64x48",
        "bmm": "4x16x8x16",
        "softmax": "64x16",
    }
    for group, shape in shapes.items():
        members = rows[rows["group"] == group]
        assert set(members["shape"]) == {shape}
        assert members["phase"].value_counts().to_dict() == {"forward": 2, "backward": 2}
    attention = rows[rows["kind"] == "flash_attention"]
    assert set(attention["shape"]) == {"2x4x4x16x8x8"}
    assert ((attention["flag"] != "").groupby(attention["phase"]).sum() == 2).all()
    assert len(read_table(rows, "ops"))


def test_times_are_those_of_the_operators(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = imported(capsys, "kineto", trace, out=tmp_path / "ops.csv")
    events = json.loads(trace.read_text())["traceEvents"]
    forward = [e["dur"] * 1e-6 for e in events if e.get("name") == "aten::addmm"]
    result = rows[(rows["group"] == "addmm") & (rows["phase"] == "forward")]["time_s"]
    assert sorted(result) == pytest.approx(sorted(forward))


def device_trace() -> dict[str, object]:
    """The linear and one all-reduce as a trace with a device holds them."""

    def event(cat: str, name: str, ts: float, dur: float, **args: object) -> dict[str, object]:
        place = {"pid": 0, "tid": 7 if cat == "kernel" else 1}
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args} | place

    inputs = {"Input Dims": [[48], [64, 32], [32, 48]], "Input type": ["c10::BFloat16"] * 3}
    node = "autograd::engine::evaluate_function: AddmmBackward0"
    transfer = {
        "Collective name": "_allgather_base",
        "In msg nelems": 1000,
        "Out msg nelems": 4000,
        "Group size": 4,
        "dtype": "BFloat16",
        "Process Group Ranks": "[0, 1, 8, 9]",
    }
    return {
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
        "traceEvents": [
            event(
                "cpu_op", "aten::addmm", 0, 9, **{"External id": 1, "Sequence number": 5} | inputs
            ),
            event("cpu_op", "aten::copy_", 1, 2, **{"External id": 2}),
            event("cpu_op", node, 50, 20, **{"External id": 3, "Sequence number": 5}),
            event("cpu_op", "aten::mm", 51, 5, **{"External id": 4}),
            event("cpu_op", "aten::mm", 60, 5, **{"External id": 5}),
            event(
                "cuda_runtime", "cudaLaunchKernel", 61, 1, **{"External id": 5, "correlation": 77}
            ),
            event("kernel", "gemm", 100, 30, **{"External id": 1}),
            event("kernel", "copy", 130, 4, **{"External id": 2}),
            event("kernel", "dgrad", 200, 25, **{"External id": 4}),
            event("kernel", "wgrad", 230, 35, **{"correlation": 77}),
            event("kernel", "ncclDevKernel_AllGather_RING_LL", 300, 40, **transfer),
        ],
    }


def test_on_a_device_kernels_count_and_collectives_come_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(device_trace()).encode()))
    out = tmp_path / "t.csv"
    rows = imported(capsys, "kineto", path, out=out, options="--fabric mine").set_index("phase")
    assert set(rows["device"]) == {"NVIDIA H200"} and set(rows["element_nbytes"]) == {2}
    assert rows.loc["forward", "time_s"] == pytest.approx(34e-6)
    assert rows.loc["backward", "time_s"] == pytest.approx(60e-6)
    (transfer,) = pd.read_csv(tmp_path / "t-collectives.csv").to_dict("records")
    assert transfer["collective"] == "all_gather" and transfer["fabric"] == "mine"
    assert (transfer["num_ranks"], transfer["num_nodes"]) == (4, 2)
    assert transfer["nbytes"] == 8000 and transfer["time_s"] == pytest.approx(40e-6)
    assert "may include waiting" in transfer["flag"]
    err = capsys.readouterr().err
    assert "1 of 1 communicators lack the traces of some ranks" in err


def test_a_trace_may_be_its_events_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare, whole = tmp_path / "bare.json", tmp_path / "whole.json"
    trace = device_trace()
    bare.write_text(json.dumps(trace["traceEvents"]))
    whole.write_text(json.dumps(trace))
    tables = [
        imported(capsys, "kineto", path, out=tmp_path / "t.csv", options="--device H200")
        for path in (bare, whole)
    ]
    pd.testing.assert_frame_equal(*tables)
    bare.write_text(json.dumps([{"ph": "b", "cat": "COLL", "name": "AllReduce", "ts": 1.0}]))
    argv = ["import", "kineto", str(bare), "--out", str(tmp_path / "t.csv")]
    assert main(argv) == ExitCode.NO_DATA
    assert "complete events (ph X)" in capsys.readouterr().err


def test_a_log_of_nccl_tests_is_read_test_by_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.log"
    path.write_text(LOG)
    argv = ["import", "nccl-tests", str(path), "--out", str(tmp_path / "t.csv"), "--fabric", "c1"]
    assert main(argv) == ExitCode.ANSWER
    assert "gather is not modelled" in capsys.readouterr().err
    rows = pd.read_csv(tmp_path / "t.csv")
    assert rows["collective"].tolist() == ["all_reduce", "all_reduce", "send"]
    assert rows["num_ranks"].tolist() == [4, 4, 2] and rows["num_nodes"].tolist() == [2, 2, 1]
    assert set(rows["device"]) == {"NVIDIA H100 80GB HBM3"}
    assert set(rows["fabric"]) == {"c1 NCCL 22807"}
    # The program prints 2 (n - 1) / n bytes a second as bus bandwidth.
    bus = rows["nbytes"] * 1.5 / rows["time_s"] / 1e9
    assert bus[:2].tolist() == pytest.approx([39.32, 49.15], abs=0.01)


def test_an_old_log_names_the_test_by_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all_gather_2gpus.txt"
    path.write_text(
        "#   Rank  0 Pid   4 on  host device  0 [0x81] Tesla V100\n"
        "#   Rank  1 Pid   5 on  host device  1 [0x82] Tesla V100\n"
        "#       size         count    type     time   algbw   busbw  error     time\n"
        "       65536          2048   float    52.01    1.26    0.63  0e+00    50.09\n"
    )
    (row,) = imported(capsys, "nccl-tests", path, out=tmp_path / "t.csv").to_dict("records")
    assert (row["collective"], row["num_ranks"]) == ("all_gather", 2)
    assert row["time_s"] == pytest.approx(52.01e-6)


@pytest.mark.parametrize(
    ("source", "text", "code"),
    [
        ("kineto", "{}", ExitCode.NO_DATA),
        ("kineto", "no json", ExitCode.NO_DATA),
        ("nccl-tests", "mpirun: command not found\n", ExitCode.NO_DATA),
        ("steps", "a,b\n1,2\n", ExitCode.USAGE),
    ],
)
def test_a_foreign_file_is_one_line(
    source: str, text: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "GPU_linear1_fp16.csv"
    path.write_text(text)
    assert main(["import", source, str(path), "--out", str(tmp_path / "o.csv")]) == code
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "GPU_linear1_fp16" in err
    assert not (tmp_path / "o.csv").exists()


def test_an_output_of_another_kind_is_a_usage_error(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", "kineto", str(trace), "--out", str(tmp_path / "o.xlsx")]) == 2
    assert ".parquet" in capsys.readouterr().err


def test_a_device_is_named_on_the_command_line_where_the_trace_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "t.json", tmp_path / "ops.csv"
    path.write_text(json.dumps(device_trace() | {"deviceProperties": []}))
    unnamed = imported(capsys, "kineto", path, out=out)
    assert set(unnamed["device"]) == {"unknown cuda device"} and unnamed["flag"].notna().all()
    assert "t.json: device not named in the trace" in capsys.readouterr().err
    named = imported(capsys, "kineto", path, out=out, options="--device H200")
    assert set(named["device"]) == {"H200"} and named["flag"].isna().all()
    argv = ["import", "nccl-tests", str(path), "--out", str(out), "--device", "H200"]
    assert main(argv) == ExitCode.USAGE
    assert "--device H200 is not for nccl-tests" in capsys.readouterr().err


def test_the_ranks_of_an_inspected_collective_are_one_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = {"inspector_output_format_version": "v4.0"}
    paths = [tmp_path / f"r{rank}.log.gz" for rank in range(2)]
    for rank, path in enumerate(paths):
        perf = {"coll": "AllGather", "coll_sn": 1, "coll_msg_size_bytes": 500}
        one = {
            "header": {"id": "0x1", "rank": rank, "n_ranks": 2, "nnodes": 1},
            "metadata": version,
            "coll_perf": perf | {"coll_exec_time_us": 10 + rank},
        }
        path.write_bytes(gzip.compress(f"{json.dumps(one)}\nno json\n".encode()))
    out = tmp_path / "c.csv"
    rows = imported(capsys, "nccl-inspector", *paths, out=out, options="--device H100 --fabric x")
    (row,) = read_table(rows, "c").to_dict("records")
    assert (row["device"], row["fabric"], row["nbytes"], row["num_ranks"]) == ("H100", "x", 1000, 2)
    assert row["time_s"] == pytest.approx(10e-6)
    assert "r1.log.gz line 2 is left out" in capsys.readouterr().err
    assert main(["import", "nccl-inspector", str(paths[0]), "--out", str(out)]) == ExitCode.USAGE
    assert "give its name with --device NAME" in capsys.readouterr().err
