"""Logs of nccl-tests as launchers, containers and versions leave them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.errors import RecordError
from forerun.calib.importers.nccl_tests import nccl_tests_collectives

COLUMNS = "size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
LINES = (
    "# Collective test starting: all_reduce_perf",
    "# nThread 1 nGpus 1 minBytes 8388608 maxBytes 33554432 step: 2(factor) validation: 1",
    "#",
    "# Using devices",
    "#  Rank  0 Group  0 Pid   1001 on      node0 device  0 [0x1b] NVIDIA H100 80GB HBM3",
    "#  Rank  1 Group  0 Pid   1002 on      node1 device  0 [0x43] NVIDIA H100 80GB HBM3",
    "#                                                     out-of-place            in-place",
    f"#       {COLUMNS}",
    "#        (B)    (elements)             (us)  (GB/s)  (GB/s)      (us)  (GB/s)  (GB/s)",
    "    8388608   2097152   float   sum   -1    992.6    8.45    8.45      0    986.0 8.51 8.51 0",
    "   16777216   4194304   float   sum   -1   1334.9   12.57   12.57      0   1336.5 12.5 12.5 0",
    "# Out of bounds values : 0 OK",
    "# Avg bus bandwidth    : 10.5",
)
TIMES_S = {8388608: 992.6e-6, 16777216: 1334.9e-6}


def read(lines: tuple[str, ...] | list[str], name: str = "log") -> tuple[pd.DataFrame, list[str]]:
    return nccl_tests_collectives("\n".join(lines), name, fabric="HDR")


def times_s(frame: pd.DataFrame) -> dict[int, float]:
    return dict(zip(frame["nbytes"], frame["time_s"].round(10), strict=True))


def glued(line: str) -> str:
    """A tag before each piece that a rank writes: a row is written in three."""
    return "[0]" + line.replace(" -1 ", " -1[0] ") if "float" in line else line


@pytest.mark.parametrize(
    "written",
    [
        str,
        "[1,0]<stdout>:{}".format,
        "0: {}".format,
        " 12: {}".format,
        "[0] {}".format,
        "node0: {}".format,
        "[rank0]:{}".format,
        "2025-11-25T10:00:00.000000Z {}".format,
        "2025-11-25T10:00:00.123+01:00 stdout F {}".format,
        "nccl-test-launcher-x7k2p | {}".format,
        glued,
        lambda line: line.replace("#  ", "   ").replace("# nThread", "nThread"),
    ],
)
def test_whatever_stands_before_a_line_the_table_is_the_same(
    written: Callable[[str], str],
) -> None:
    frame, problems = read([written(line) for line in LINES])
    assert times_s(frame) == TIMES_S and problems == []
    assert set(frame["num_ranks"]) == {2} and set(frame["num_nodes"]) == {2}
    assert set(frame["collective"]) == {"all_reduce"}
    assert set(frame["device"]) == {"NVIDIA H100 80GB HBM3"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A program and the table that it prints on some ranks."""

    program: str
    num_ranks: int = 2
    nbytes: int = 1 << 24

    @property
    def truth(self) -> str:
        return {"alltoall": "all_to_all", "sendrecv": "send"}.get(self.program, self.program)

    @property
    def lines(self) -> list[str]:
        """Print the table without the program's name; the factors are those of its documents."""
        share = (self.num_ranks - 1) / self.num_ranks
        factor = {"all_reduce": 2 * share, "broadcast": 1.0, "sendrecv": 1.0}
        time_us = self.nbytes / 100e3
        rates = f"{100.0:.2f} {100.0 * factor.get(self.program, share):.2f}"
        ranks = [
            LINES[4]
            .replace("Rank  0", f"Rank {rank:2}")
            .replace("Pid   1001", f"Pid {1001 + rank}")
            for rank in range(self.num_ranks)
        ]
        row = f"{self.nbytes} {self.nbytes // 4} float sum -1 {time_us:.1f} {rates} 0 1.0 1 1 0"
        return [*LINES[1:4], *ranks, *LINES[6:9], row, *LINES[11:]]


def test_a_test_may_name_itself_in_its_last_line() -> None:
    last = "# Collective test concluded: reduce_scatter_perf"
    frame, _ = read([*Run(program="reduce_scatter").lines, last])
    assert set(frame["collective"]) == {"reduce_scatter"}


def test_the_last_line_of_one_test_names_no_other() -> None:
    named = [
        *Run(program="reduce_scatter").lines,
        "# Collective test concluded: reduce_scatter_perf",
    ]
    frame, problems = read([*named, *Run(program="all_gather").lines], "all_gather.txt")
    assert list(frame["collective"]) == ["reduce_scatter", "all_gather"]
    assert problems == []


def command(program: str) -> str:
    return f"+ mpirun -np 8 ./build/{program}_perf -b 8 -e 128M -f 2"


@pytest.mark.parametrize("before", [command, "=== {}_perf, 2 nodes ===".format])
def test_the_command_or_title_of_the_next_test_names_not_the_table_above_it(
    before: Callable[[str], str],
) -> None:
    programs = ("all_reduce", "all_gather", "alltoall", "alltoall", "broadcast")
    runs = [Run(program=one, nbytes=1 << 20 + n) for n, one in enumerate(programs)]
    frame, problems = read([line for run in runs for line in (before(run.program), *run.lines)])
    assert list(frame["collective"]) == [run.truth for run in runs] and problems == []


STYLES: dict[str, tuple[bool, Callable[[str, list[str]], list[str]]]] = {
    "first line": (True, lambda p, t: [f"# Collective test starting: {p}_perf", *t]),
    "last line": (True, lambda p, t: [*t, f"# Collective test concluded: {p}_perf"]),
    "command": (True, lambda p, t: [command(p), *t]),
    "title": (True, lambda p, t: [f"== {p}_perf ==", *t]),
    "both": (False, lambda p, t: [f"starting {p}_perf", *t, f"{p}_perf done"]),
    "behind": (False, lambda p, t: [*t, f"{p}_perf done"]),
    "nothing": (False, lambda _, t: t),
}
PROGRAMS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "sendrecv")


@settings(deadline=None, max_examples=200)
@given(
    programs=st.lists(st.sampled_from(PROGRAMS), min_size=1, max_size=5),
    style=st.sampled_from(sorted(STYLES)),
    num_ranks=st.integers(2, 8),
    is_listed=st.booleans(),
)
def test_a_table_has_the_name_of_its_own_test_or_none(
    programs: list[str], style: str, num_ranks: int, is_listed: bool
) -> None:
    """The script may be printed first, with all commands; each table is told by its size."""
    is_certain, written = STYLES[style]
    runs = [
        Run(program=one, num_ranks=num_ranks, nbytes=1 << 20 + n) for n, one in enumerate(programs)
    ]
    lines = [line for run in runs for line in written(run.program, run.lines)]
    if is_listed:
        lines = [*map(command, programs), *lines]
    try:
        frame, problems = read(lines)
    except RecordError:
        assert not is_certain or is_listed
        return
    truth = {run.nbytes: run.truth for run in runs}
    names = dict(zip(frame["nbytes"], frame["collective"], strict=True))
    assert names.items() <= truth.items()
    assert names == truth or problems
    if is_certain and not is_listed:
        assert names == truth


def test_a_command_that_failed_names_no_other_table() -> None:
    failed = [command("all_reduce"), *LINES[1:6], "node0: Test NCCL failure common.cu:279"]
    run = Run(program="all_gather")
    frame, _ = read([*failed, command("all_gather"), *run.lines])
    assert list(frame["collective"]) == ["all_gather"]
    crashed = [*failed[:-1], "Segmentation fault", command("all_gather"), *run.lines]
    assert list(read(crashed)[0]["collective"]) == ["all_gather"]


def test_bandwidths_of_another_collective_refuse_the_name() -> None:
    """A name of the file is the user's word; 2 (n - 1) / n is the bus factor of no all-gather."""
    lines = Run(program="all_reduce", num_ranks=8).lines
    with pytest.raises(RecordError, match=r"175 GB/s at 100, which all_gather of 8 ranks never"):
        read(lines, "all_gather.log")
    assert len(read(lines, "all_reduce.log")[0]) == 1


def test_a_test_that_nobody_names_is_named_by_its_file() -> None:
    with pytest.raises(RecordError, match="name the file after its program"):
        read(LINES[1:])
    assert set(read(LINES[1:], "all_reduce_perf.log")[0]["collective"]) == {"all_reduce"}


def test_worlds_of_one_rank_send_nothing() -> None:
    other = LINES[5].replace("Rank  1", "Rank  0")
    for lines in ([*LINES[:5], *LINES[6:]], [*LINES[:5], LINES[3], other, *LINES[6:]]):
        with pytest.raises(RecordError, match=r"worlds of one rank.*MPI=1"):
            read(lines)


def test_a_list_of_ranks_that_is_cut_refuses_the_test() -> None:
    """Two public ones: the last of the 72 ranks of coreweave/nccl-tests pull request 43, whose bus
    bandwidth of 586.06 at 297.16 GB/s is 2 x 71/72 as on 72 ranks; the first two of 8 of ROCm's
    documentation, on -g 8, with 360.97 at 206.27 GB/s, 2 x 7/8."""
    assert pytest.approx(2 * 71 / 72, rel=1e-3) == 586.06 / 297.16
    last = LINES[4].replace("Rank  0", "Rank 71")
    with pytest.raises(RecordError, match=r"lists 1 of its 72 ranks; keep all lines"):
        read([*LINES[:4], last, *LINES[6:]])
    assert pytest.approx(2 * 7 / 8, rel=1e-3) == 360.97 / 206.27
    with pytest.raises(RecordError, match=r"lists 2 of its 8 ranks; keep all lines"):
        read([LINES[0], LINES[1].replace("nGpus 1", "nGpus 8"), *LINES[2:]])


def test_ranks_on_several_devices_are_named() -> None:
    """As in NVIDIA/nccl-tests issue 128, which asks for different GPUs."""
    other = LINES[5].replace("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
    frame, (problem,) = read([*LINES[:5], other, *LINES[6:]])
    assert set(frame["device"]) == {"NVIDIA H100 80GB HBM3"}
    assert "NVIDIA A100-SXM4-80GB, NVIDIA H100 80GB HBM3" in problem


@pytest.mark.parametrize("library", ["nccl", "rccl"])
def test_each_test_has_the_version_of_its_library(library: str) -> None:
    """Line of rccl-tests 2.17.9, which has its own name for each version."""
    lines = [f"# {library}-tests version 2.17.9 {library}-headers=2 {library}-library={{}}", *LINES]
    both = [line.format(22707) for line in lines] + [line.format(22803) for line in lines]
    fabrics = [f"HDR {library.upper()} {version}" for version in (22707, 22707, 22803, 22803)]
    assert list(read(both)[0]["fabric"]) == fabrics


def test_sizes_with_wrong_results_are_left_out_and_counted() -> None:
    wrong = LINES[9].replace("8.45      0", "8.45   4096")
    frame, (problem,) = read([*LINES[:9], wrong, *LINES[10:]])
    assert list(times_s(frame)) == [16777216] and "1 sizes with wrong results" in problem


def test_wrong_results_of_no_known_size_refuse_the_test() -> None:
    unchecked = [line.replace(" 0 ", " N/A ") if "float" in line else line for line in LINES]
    assert times_s(read(unchecked)[0]) == TIMES_S
    failed = [*unchecked[:-2], "# Out of bounds values : 12 FAILED"]
    with pytest.raises(RecordError, match="wrong values and does not print in which rows"):
        read(failed)


def test_what_was_measured_before_a_failure_is_taken_and_named() -> None:
    end = "node0: Test NCCL failure common.cu:279 'unhandled system error'"
    frame, (problem,) = read([*LINES[:11], end])
    assert times_s(frame) == TIMES_S and "aborted" in problem


def test_old_versions_say_the_largest_error_of_a_sum() -> None:
    old = [line.replace("#wrong", "error").replace(" root", "") for line in LINES]
    old = [line.replace(" -1 ", " ").replace(" 0 ", " 4e-07 ") for line in old[:9]] + [
        line.replace(" -1 ", " ").replace("      0 ", "  4e-07 ") for line in old[9:]
    ]
    old[4:6] = LINES[4:6]
    assert times_s(read(old)[0]) == TIMES_S
