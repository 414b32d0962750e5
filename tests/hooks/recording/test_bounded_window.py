"""Windows of ranks of a large world: bounded, and what is kept is the same on all ranks."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from simulated_steps import SimulatedRank, steps

from forerun.calib.marks.marked_window import MarkedWindow
from forerun.calib.marks.run_records import RankFile
from forerun.calib.records.record_kinds import StepFlag, StepRecord, WindowRecord, to_dict
from forerun.calib.workload.parallelism import Parallelism
from forerun.calib.workload.recording import MESSAGE_NBYTES, RecordingDetail, recording_plan
from forerun.hooks.recording._bounded_window import (
    BoundedWindow,
    ClosedWindow,
    line_of,
)
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
    marked = MarkedWindow()
    for record, log in simulated_steps(rank, **size):
        record = replace(record, window=window)
        if record.step in flagged:
            record = replace(record, flags=(StepFlag.COLLECTED,))
        marked.note(record)
        bounded.takes(record, line_of(record))
        marked.steps.append(log)
    marked.end = WindowRecord(
        window=window, first_step=3, last_step=22, num_faults=0, num_dropped=0
    )
    return bounded.close(marked)


def rows(window: ClosedWindow) -> list[dict]:
    """The records of the window's lines, as a reader of the file makes them."""
    file = RankFile("rank")
    file.take([line_of(SimulatedRank(LAYOUT, 16383).header()), *window.lines])
    assert not file.problems
    return [to_dict(record) for record in file.records]


def of(records: list[dict], kind: str) -> list[dict]:
    return [row for row in records if row["type"] == kind]


def transfers(window: ClosedWindow) -> set[tuple]:
    return {(r["step"], r["role"], r["sequence"]) for r in of(rows(window), "collective")}


@pytest.mark.parametrize("num_microbatches", [4, 40])
def test_files_and_summaries_keep_their_bounds(num_microbatches: int) -> None:
    for rank in (16383, PLAN.recorders[0], 0):
        window = closed(rank, num_microbatches=num_microbatches, num_layers=3)
        assert len(window.message) <= MESSAGE_NBYTES
        assert sum(map(len, window.lines)) <= (PLAN.file_nbytes(rank) or 0) // 2
        assert (rank == 0) == (not window.lines) == bool(window.message)


def test_a_watcher_sends_its_summary_alone() -> None:
    summary = json.loads(closed(5, num_microbatches=4).message)
    assert (summary["type"], summary["rank"], summary["num_steps"]) == ("rank", 5, 10)
    assert summary["step_ns"] > 0 and len(summary["wait_ns"]) == len(summary["wait_roles"]) == 2


def test_a_member_of_a_shared_group_keeps_that_groups_collectives_alone() -> None:
    rank = next(rank for rank, part in PLAN.parts.items() if part is RecordingDetail.GROUPS)
    results = rows(closed(rank, num_microbatches=4))
    assert {row["role"] for row in of(results, "collective")} == {"dp"}
    assert not of(results, "phase") and not of(results, "operator")
    assert Counter(row["step"] for row in of(results, "collective")) == dict.fromkeys(HOOKED, 8)


def test_what_little_room_keeps_more_room_keeps_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    retained = []
    for budget_kib in (20, 60, 100, 200, 400):
        bounded = BoundedWindow(PLAN, 16383)
        bounded._remaining_nbytes = budget_kib << 10
        window = closed(16383, bounded=bounded, num_microbatches=16, num_layers=2)
        assert sum(map(len, window.lines)) <= budget_kib << 9
        retained.append(transfers(window))
        steps_kept = sorted({step for step, *_ in retained[-1]})
        assert steps_kept == [*HOOKED][: len(steps_kept)]
        (end,) = of(rows(window), "window")
        assert end["num_left_out"] == len(HOOKED) - len(steps_kept)
    assert all(small <= large for small, large in pairwise(retained))
    assert not retained[0] and len({len(results) for results in retained}) >= 4


def test_steps_that_are_no_measurement_take_no_room() -> None:
    flagged = frozenset({3, 19, 11})
    results = rows(closed(16383, num_microbatches=8, flagged=flagged))
    assert {row["step"] for row in of(results, "phase")} == {*HOOKED} - flagged
    assert of(results, "window")[0]["num_left_out"] == 0
    assert of(results, "rank")[0]["num_steps"] == 7


def test_windows_of_a_long_run_share_the_file_and_the_last_ones_still_close() -> None:
    bounded = BoundedWindow(PLAN, 16383)
    windows = [closed(16383, bounded=bounded, num_microbatches=40, window=n) for n in range(14)]
    assert all(of(rows(window), "window") for window in windows)
    sizes = [sum(map(len, window.lines)) for window in windows]
    assert sum(sizes) <= (PLAN.file_nbytes(16383) or 0)
    assert sizes[0] > 200 << 10 and sizes[-1] < sizes[0] / 4


def test_a_step_that_makes_no_sense_costs_no_other() -> None:
    faults: list[Exception] = []
    bounded = BoundedWindow(PLAN, 16383, on_fault=faults.append)
    rank = SimulatedRank(LAYOUT, 16383, num_microbatches=2, num_layers=1)
    marked = MarkedWindow(
        end=WindowRecord(window=0, first_step=3, last_step=22, num_faults=0, num_dropped=0)
    )
    for record, log in steps(rank, HOOKED):
        marked.note(record)
        marked.steps.append(log)
    marked.steps[0].shapes.append((object(), 2))
    results = rows(bounded.close(marked))
    assert len(faults) == 1
    assert of(results, "rank")[0]["num_steps"] == 9
    assert {row["step"] for row in of(results, "phase")} == set(HOOKED) - {3}
