"""Sixteen real ranks on two nodes without a common disk: files of each, summaries of all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import many_ranks
import pytest

from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.record_kinds import (
    CollectiveRecord,
    OperatorRecord,
    PhaseRecord,
    StepRecord,
    WindowRecord,
)
from forerun.calib.samples.recent import RecentWindows
from forerun.calib.samples.store import RunReader, read_run
from forerun.calib.samples.table import SampleTable, build_table
from forerun.calib.workload.recording import RecordingDetail, recording_plan

pytestmark = pytest.mark.slow
PLAN = recording_plan(many_ranks.WORLD, many_ranks.LAYOUT)
NODES = (range(8), range(8, 16))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    done = subprocess.run(
        [sys.executable, many_ranks.__file__, str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "[forerun]" not in done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def home(directory: Path) -> Path:
    (summaries,) = directory.glob("node*/records/*/summaries.jsonl")
    return summaries.parents[2]


@pytest.fixture(scope="module")
def collected(directory: Path, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home node's directory once the other's records are copied into it."""
    folder = tmp_path_factory.mktemp("collected")
    for node in (home, *(one for one in directory.glob("node*") if one != home)):
        shutil.copytree(node / "records", folder / "records", dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def run(collected: Path) -> RunRecords:
    return read_run(collected)


@pytest.fixture(scope="module")
def table(run: RunRecords) -> SampleTable:
    return build_table(run)


def test_training_is_what_it_is_without_us(directory: Path) -> None:
    rows = [json.loads(path.read_text()) for path in directory.glob("told-*.json")]
    assert len(rows) == many_ranks.WORLD
    for row in rows:
        assert row["hooked"] == row["bare"]
        assert row["hooked_calls"] == row["bare_calls"] == [2 * many_ranks.NUM_STEPS] * 2


def test_the_home_node_says_what_it_lacks_and_how_to_get_it(home: Path) -> None:
    run = read_run(home)
    missing = [rank for rank in PLAN.recorders if rank not in run.records]
    assert 0 < len(missing) < len(PLAN.recorders)
    (problem,) = run.problems
    assert f"missing: {', '.join(map(str, missing))}" in problem
    assert f"copy their records/{run.run_id} here" in problem
    assert build_table(run).collectives.shape[0]
    windows = RecentWindows()
    windows.add(RunReader(home, run.run_id).read())
    assert windows.lacking(0) == set(missing) and not windows.is_complete(0)
    assert windows.is_complete(0, without=windows.lacking(0))


def test_collected_records_are_those_of_all_that_record(
    run: RunRecords, collected: Path, table: SampleTable
) -> None:
    assert tuple(run.records) == PLAN.recorders and run.problems == ()
    windows = RecentWindows()
    windows.add(RunReader(collected, run.run_id).read())
    assert windows.is_complete(0) and not windows.is_complete(1)
    assert windows.table().equals(table)
    numbers = {
        tuple(r.step for r in records if isinstance(r, StepRecord))
        for records in run.records.values()
    }
    assert len(numbers) == 1
    kinds = {
        rank: {type(record) for record in records} - {StepRecord, WindowRecord}
        & {PhaseRecord, OperatorRecord, CollectiveRecord}
        for rank, records in run.records.items()
    }
    for rank, records in kinds.items():
        has_phases = PhaseRecord in records
        assert (
            has_phases == (PLAN.part(rank) is not RecordingDetail.GROUPS)
            and CollectiveRecord in records
        )


def test_every_rank_is_summarised(run: RunRecords, table: SampleTable) -> None:
    assert tuple(run.summaries) == tuple(range(many_ranks.WORLD))
    for rank_records in run.summaries.values():
        assert (
            len(rank_records) == 1
            and rank_records[0].num_steps >= 1
            and rank_records[0].step_ns > 0
        )
        assert rank_records[0].wait_roles == ("tp", "world")
    assert sorted(table.ranks["rank"]) == list(range(many_ranks.WORLD))


def test_transfers_inside_the_replica_are_measured_on_all_their_ranks(table: SampleTable) -> None:
    rows = table.collectives.set_index("role")
    assert not rows.loc[["tp"], "is_bound"].any()
    assert set(rows.loc[["tp"], "num_seen"]) == {many_ranks.TP}
    assert set(table.skew["rank"]) == PLAN.replica


def test_the_other_node_has_its_own_files_alone(directory: Path, home: Path) -> None:
    for node, ranks in enumerate(NODES):
        folder = directory / f"node{node}"
        recorded_ranks = {int(path.stem[-5:]) for path in folder.glob("records/*/rank-*.jsonl")}
        assert recorded_ranks == set(PLAN.recorders) & set(ranks)
        assert (folder == home) == bool([*folder.glob("records/*/summaries.jsonl")])


def test_what_was_sent_is_bounded(home: Path) -> None:
    assert (next(home.glob("records/*/summaries.jsonl"))).stat().st_size < 4096
