"""Logs of NCCL Inspector: records that others published, and planted operations recovered."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.errors import RecordError
from forerun.calib.importers.canonical_tables import collective_table
from forerun.calib.importers.nccl_inspector import (
    CONTRADICTION,
    HOST_TIMED,
    SHARED,
    inspector_operations,
)
from forerun.calib.importers.rank_operations import WAITING, joined_ranks


def header(**values: object) -> dict[str, object]:
    return {"id": "0x7f8c496ae9f661", "rank": 0, "n_ranks": 8, "nnodes": 1} | values


def record(
    perf: dict[str, object], version: str = "v4.0", kind: str = "coll", **values: object
) -> dict[str, object]:
    metadata = {"inspector_output_format_version": version, "hostname": "n", "pid": 1}
    return {"header": header(**values), "metadata": metadata, f"{kind}_perf": perf}


def perf(name: str, size: object, time_us: object, kind: str = "coll", **more: object) -> dict:
    values = {"sn": 7, "msg_size_bytes": size, "exec_time_us": time_us, **more}
    return {kind: name} | {f"{kind}_{key}": value for key, value in values.items()}


def text(*records: object) -> str:
    return "".join(f"{json.dumps(one)}\n" for one in records)


def rows(*logs: str) -> tuple[list[dict], list[str]]:
    read = [inspector_operations(log, f"r{n}.log") for n, log in enumerate(logs)]
    logs = [one.assign(device="H100", fabric="f") for one, _ in read]
    frame, notes = joined_ranks(logs, "logs")
    checked = collective_table(frame, "t") if len(frame) else frame
    problems = [problem for _, some in read for problem in some]
    return checked.to_dict("records"), problems + notes


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_nodes", "size", "time_us", "algobw", "busbw", "nbytes"),
    [
        # NVIDIA/nccl 5067397c, plugins/profiler/inspector/README.md, twice.
        ("AllReduce", 8, 1, 17179869184, 61974, 277.210914, 485.119099, 17179869184),
        ("ReduceScatter", 8, 1, 2147483648, 41057, 418.439467, 366.134533, 8 * 2147483648),
        # The same, exporter/example/README.md.
        ("ReduceScatter", 32, 4, 65536, 110, 19.065018, 18.469236, 32 * 65536),
        # DataDog/integrations-core, a record of a run, in a test.
        ("AllReduce", 3, 3, 2360832, 5663.0, 0.416887, 0.555850, 2360832),
        # NVIDIA/nccl issue 1945.
        ("AllReduce", 8, 1, 17179869184, 61974, 277.21, 485.12, 17179869184),
    ],
)
def test_published_records_have_their_bandwidths(
    name, num_ranks, num_nodes, size, time_us, algobw, busbw, nbytes
):
    one = record(
        perf(name, size, time_us, algobw_gbs=algobw, busbw_gbs=busbw, timing_source="kernel_gpu"),
        n_ranks=num_ranks,
        nnodes=num_nodes,
    )
    ((row,), notes) = rows(text(one))
    assert (row["num_ranks"], row["num_nodes"], row["nbytes"]) == (num_ranks, num_nodes, nbytes)
    assert row["nbytes"] / row["time_s"] / 1e9 == pytest.approx(algobw, abs=0.005)
    assert row["flag"] == WAITING and row["device"] == "H100"
    assert notes == [
        "1 of 1 communicators lack the logs of some ranks, so that their times may include waiting "
        "and have a flag; give the logs of all ranks"
    ]
    one["coll_perf"]["coll_algobw_gbs"] = algobw + 0.02
    ((wrong,), _) = rows(text(one))
    assert wrong["flag"] == f"{CONTRADICTION}; {WAITING}"


PLANTED = st.tuples(
    st.sampled_from(["AllReduce", "AllGather", "ReduceScatter", "Broadcast"]),
    st.integers(1, 2**33),
    st.lists(st.integers(1, 10**7), min_size=2, max_size=5),
)


def factors(name: str, num_ranks: int) -> tuple[int, float]:
    """Ranks whose sizes add up, and the bus factor, as inspector.cc has them."""
    share = (num_ranks - 1) / num_ranks
    return {
        "AllReduce": (1, 2 * share),
        "AllGather": (num_ranks, share),
        "ReduceScatter": (num_ranks, share),
        "Broadcast": (1, 1.0),
    }[name]


@settings(deadline=None, max_examples=20)
@given(planted=st.lists(PLANTED, min_size=1, max_size=6), version=st.sampled_from("0123"))
def test_planted_operations_come_back_with_the_shortest_time_of_their_ranks(planted, version):
    num_ranks = min(len(times) for _, _, times in planted)
    logs: list[str] = []
    for rank in range(num_ranks):
        lines = []
        for number, (name, size, times) in enumerate(planted):
            parts, factor = factors(name, num_ranks)
            algobw = size * parts / 1e3 / times[rank]
            written = {"algobw_gbs": round(algobw, 6), "busbw_gbs": round(algobw * factor, 6)}
            one = record(
                perf(name, size, times[rank], sn=number, **written),
                version=f"v4.{version}",
                rank=rank,
                n_ranks=num_ranks,
            )
            lines.append(one)
        logs.append(text(*_grouped(lines) if version == "3" else lines))
    result, notes = rows(*logs)
    assert not notes and all(row["flag"] == "" for row in result)
    assert [(row["nbytes"], row["time_s"]) for row in result] == [
        (size * factors(name, num_ranks)[0], pytest.approx(min(times[:num_ranks]) * 1e-6))
        for name, size, times in planted
    ]


def _grouped(lines: list[dict]) -> Iterable[dict]:
    """One dump as format 4.3 writes it: its communicator once, then its operations."""
    stats = {"coll_records": len(lines), "p2p_records": 0, "coll_dropped_total": 3}
    yield {key: lines[0][key] for key in ("header", "metadata")} | {"dump_stats": stats}
    yield from ({"coll_perf": one["coll_perf"]} for one in lines)


def test_an_operation_without_its_communicator_is_left_out():
    """A damaged line may have named another communicator: what follows is not of the one before."""
    one, two = (record(perf("AllReduce", 8, 5, sn=n), version="v4.3") for n in (1, 2))
    first, operation = _grouped([one])
    torn = json.dumps(first)[:40]
    log = text(first, operation) + torn + "\n" + text({"coll_perf": two["coll_perf"]})
    (result, problems) = rows(log)
    assert len(result) == 1
    assert problems[:2] == [
        "r0.log line 3 is left out: it is no JSON object",
        "r0.log line 4 is left out: no line before it names its communicator",
    ]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (
            record(perf("AllReduce", 8, 5), version="v5.0"),
            "its format 'v5.0' is not one of v4.0 to",
        ),
        (record(perf("All2All", 8, 5)), "All2All is not modelled"),
        (record(perf("AllGatherV", 8, 5)), "AllGatherV is not modelled"),
        (
            record(perf("AllReduce", 2**64 - 8, 5)),
            "its msg_size_bytes is not above 0 and below 2^63",
        ),
        (record(perf("AllGather", 2**62, 5)), "its ranks' sizes add up to 2^63 or more"),
        (record(perf("AllReduce", 8.5, 5)), "its msg_size_bytes is no whole number"),
        (record(perf("AllReduce", 8, 0)), "its exec_time_us is not above 0"),
        (record(perf("AllReduce", 8, "nan")), "its exec_time_us is not above 0"),
        (record(perf("AllReduce", 8, 5), n_ranks=1), "rank 0 of 1 on 1 nodes sends nothing"),
        (record(perf("AllReduce", 8, 5), rank=None), "rank None of 8 on 1 nodes"),
        (
            record(perf("Send", 8, 5, "p2p"), kind="p2p", nnodes=2),
            "its two ranks may share a node or not",
        ),
        ({"header": 5}, "a part of it is no JSON object"),
        ([1], "it is no JSON object"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_and_the_rest_survives(wrong, reason):
    good = record(perf("AllReduce", 64, 5))
    (result, problems) = rows(text(wrong, good))
    assert [row["nbytes"] for row in result] == [64]
    assert problems[0].startswith(f"r0.log line 1 is left out: {reason}")
    with pytest.raises(RecordError, match=r"; give logs that NCCL's Inspector plugin writes"):
        rows(text(wrong))


def test_what_is_not_the_time_of_one_transfer_has_a_flag():
    pair = {"kind": "p2p"}
    log = text(
        record(perf("AllReduce", 64, 5, timing_source="collective_cpu")),
        record(perf("Send", 64, 5, "p2p", algobw_gbs=0.0128, busbw_gbs=0.0128), **pair),
        record(perf("Recv", 64, 6, "p2p"), n_ranks=2, nnodes=2, **pair),
    )
    result, _ = rows(log)
    flags = [f"{HOST_TIMED}; {WAITING}", f"{SHARED}; {WAITING}", WAITING]
    assert [row["flag"] for row in result] == flags
    assert [(row["num_ranks"], row["num_nodes"]) for row in result] == [(8, 1), (2, 1), (2, 2)]


def test_a_time_of_the_kernel_counts_before_a_shorter_one_of_the_host():
    host = record(perf("AllReduce", 64, 5, timing_source="collective_cpu"), n_ranks=2)
    kernel = record(perf("AllReduce", 64, 9, timing_source="kernel_gpu"), n_ranks=2, rank=1)
    ((row,), notes) = rows(text(host), text(kernel))
    assert row["time_s"] == pytest.approx(9e-6) and row["flag"] == "" and not notes


def test_lines_left_out_for_one_reason_are_one_note():
    log = text(*[record(perf("All2All", 8, 5))] * 3, record(perf("AllReduce", 8, 5)))
    assert rows(log)[1][0] == "r0.log line 1 and 2 more are left out: All2All is not modelled"


def test_replays_of_a_captured_graph_stay_apart():
    log = text(*(record(perf("AllReduce", 64, time), n_ranks=2) for time in (5, 6, 7)))
    result, _ = rows(log)
    assert [row["time_s"] for row in result] == pytest.approx([5e-6, 6e-6, 7e-6])
