"""Windows of ranks of a large world: bounded, and what is kept is the same on all ranks."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_steps import SimulatedRank, steps

from forerun.calib.records.packed import Packer, unpacked
from forerun.calib.records.record_kinds import StepFlag, StepRecord, WindowRecord
from forerun.calib.workload.parallelism import Parallelism
from forerun.calib.workload.recording import MESSAGE_NBYTES, RecordingDetail, recording_plan
from forerun.hooks.recording._bounded_window import (
    BoundedWindow,
    ClosedWindow,
    StepDetail,
    in_retention_order,
    levels_of,
    line_of,
    pack_steps,
)
from forerun.hooks.recording.window_records import WindowRecords
from forerun.hooks.sensors.step_log import StepLog

LAYOUT = Parallelism(tp=8, pp=16, dp=128)
PLAN = recording_plan(16384, LAYOUT)
HOOKED = range(3, 23, 2)


@cache
def simulated_steps(rank: int, **size: int) -> list[tuple[StepRecord, StepLog]]:
    """Ten hooked steps: marks can be read any number of times."""
    has_operators = PLAN.part(rank) is RecordingDetail.OPERATORS
    return list(steps(SimulatedRank(LAYOUT, rank, has_operators=has_operators, **size), HOOKED))


def closed(
    rank: int,
    *,
    bounded: BoundedWindow | None = None,
    flagged: frozenset[int] = frozenset(),
    window: int = 0,
    **size: int,
) -> ClosedWindow:
    bounded = bounded or BoundedWindow(PLAN, rank)
    records = WindowRecords()
    for record, log in simulated_steps(rank, **size):
        record = replace(record, window=window)
        if record.step in flagged:
            record = replace(record, flags=(StepFlag.COLLECTED,))
        records.note(record)
        bounded.takes(record, line_of(record))
        records.logs.append(log)
    end = WindowRecord(window=window, first_step=3, last_step=22, num_faults=0, num_dropped=0)
    header = line_of(SimulatedRank(LAYOUT, rank).header())
    return bounded.close(records, end, (), header=header)


def rows(text: str) -> list[dict]:
    return [json.loads(line) for line in unpacked(text.splitlines(keepends=True))]


def of(records: list[dict], kind: str) -> list[dict]:
    return [row for row in records if row["type"] == kind]


@pytest.mark.parametrize("num_microbatches", [4, 40])
def test_messages_and_files_keep_their_bounds(num_microbatches: int) -> None:
    for rank in (16383, PLAN.recorders[0], 0):
        window = closed(rank, num_microbatches=num_microbatches, num_layers=3)
        assert 0 < len(window.message) <= MESSAGE_NBYTES
        assert sum(map(len, window.lines)) <= (PLAN.file_nbytes(rank) or 0) // 2
        assert (rank == 0) == (not window.lines)


def test_the_message_of_a_recorder_is_its_file_and_its_steps() -> None:
    window = closed(16383, num_microbatches=4)
    sent, file_rows = rows(window.message), rows("".join(window.lines))
    assert sent[0]["type"] == "header" and sent[0]["rank"] == 16383
    assert [row["step"] for row in of(sent, "step")] == list(HOOKED)
    assert [row for row in sent if row["type"] not in ("header", "step")] == file_rows
    assert len(of(file_rows, "window")) == len(of(file_rows, "rank")) == 1


def test_a_watcher_sends_its_summary_alone() -> None:
    (summary,) = rows(closed(5, num_microbatches=4).message)
    assert (summary["type"], summary["rank"], summary["num_steps"]) == ("rank", 5, 10)
    assert summary["step_ns"] > 0 and len(summary["wait_ns"]) == len(summary["wait_roles"]) == 2


def test_a_member_of_a_shared_group_keeps_that_groups_collectives_alone() -> None:
    rank = next(rank for rank, part in PLAN.parts.items() if part is RecordingDetail.GROUPS)
    results = rows(closed(rank, num_microbatches=4).message)
    assert {row["role"] for row in of(results, "collective")} == {"dp"}
    assert not of(results, "phase") and not of(results, "operator")
    assert Counter(row["step"] for row in of(results, "collective")) == dict.fromkeys(HOOKED, 8)


def test_what_little_room_keeps_more_room_keeps_as_well() -> None:
    retained = []
    for budget_kib in (2, 5, 9, 14, 28, 56):
        packer = Packer(budget_kib << 10)
        window = WindowRecords()
        results = simulated_steps(16383, num_microbatches=16, num_layers=2)
        logs = {(log.step - 3) // 2: log for _, log in results}
        order = in_retention_order(logs)
        details = (StepDetail(window.of(logs[n]), logs[n].samples) for n in order)
        pack_steps(packer, details, len(order))
        results = rows(packer.line())
        retained.append(
            {(r["step"], r["role"], r["sequence"]) for r in of(results, "collective")}
            | {(r["step"], r["name"], r["microbatch"]) for r in of(results, "phase")}
        )
    assert all(small <= large for small, large in pairwise(retained))
    assert len({len(results) for results in retained}) >= 4


def test_kept_calls_stand_for_all_calls() -> None:
    _, log = simulated_steps(16383, num_microbatches=16, num_layers=2)[0]
    detail = StepDetail(WindowRecords().of(log), log.samples)
    whole = [json.loads(line) for line in detail.lines(0)]
    counts = Counter((r["collective"], r["role"]) for r in of(whole, "collective"))
    for level in range(1, detail.max_level + 1):
        results = [json.loads(line) for line in detail.lines(level)]
        assert of(results, "phase") == of(whole, "phase")
        weights: Counter[tuple[str, str]] = Counter()
        for row in of(results, "collective"):
            weights[row["collective"], row["role"]] += row["stands_for"]
        assert weights == counts
    assert len(of(results, "collective")) < len(of(whole, "collective"))


def test_steps_that_are_no_measurement_take_no_room() -> None:
    flagged = frozenset({3, 19, 11})
    results = rows(closed(16383, num_microbatches=8, flagged=flagged).message)
    retained_steps = {row["step"] for row in of(results, "phase")}
    assert len(retained_steps) >= 3 and not retained_steps & flagged
    assert of(results, "window")[0]["num_left_out"] == 7 - len(retained_steps)
    assert of(results, "rank")[0]["num_steps"] == 7


def test_windows_of_a_long_run_share_the_file_and_the_last_ones_still_close() -> None:
    bounded = BoundedWindow(PLAN, 16383)
    lines_by_window = [
        closed(16383, bounded=bounded, num_microbatches=8, window=n).lines for n in range(11)
    ]
    sizes = [sum(map(len, lines)) for lines in lines_by_window]
    assert sum(sizes) <= (PLAN.file_nbytes(16383) or 0)
    assert sizes[0] > 40 << 10 and sizes[-1] < sizes[0] / 4
    assert all(of(rows("".join(lines)), "window") for lines in lines_by_window)


@given(st.integers(1, 40), st.integers(1, 40))
def test_an_earlier_end_of_a_window_keeps_a_part_of_the_same_steps(few: int, many: int) -> None:
    few, many = sorted((few, many))
    short, long = in_retention_order(range(few)), in_retention_order(range(many))
    assert [n for n in long if n < few] == short


@given(st.integers(1, 64), st.integers(1, 8), st.integers(0, 7))
def test_each_level_halves_the_passes_of_the_one_before(num: int, stride: int, first: int) -> None:
    samples = [n if n % stride == first % stride else -1 for n in range(num)]
    levels = levels_of(samples)
    counts = [sum(at >= level for at in levels) for level in range(8)]
    assert counts[0] == num and counts[1] == sum(m >= 0 for m in samples)
    for fine, coarse in pairwise(counts[1:]):
        assert coarse == (fine + 1) // 2


def test_a_step_that_makes_no_sense_costs_no_other() -> None:
    faults: list[Exception] = []
    bounded = BoundedWindow(PLAN, 16383, on_fault=faults.append)
    rank = SimulatedRank(LAYOUT, 16383, num_microbatches=2, num_layers=1)
    records = WindowRecords()
    for record, log in steps(rank, HOOKED):
        records.note(record)
        records.logs.append(log)
    records.logs[0].marks.pop()
    end = WindowRecord(window=0, first_step=3, last_step=22, num_faults=0, num_dropped=0)
    results = rows(bounded.close(records, end, (), header=line_of(rank.header())).message)
    assert len(faults) == 1
    assert of(results, "rank")[0]["num_steps"] == 9
    assert {row["step"] for row in of(results, "phase")} == set(HOOKED) - {3}
