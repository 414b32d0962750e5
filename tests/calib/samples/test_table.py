"""The table holds what was planted in the records, whatever order they come in."""

from __future__ import annotations

import random
from dataclasses import replace

import pandas as pd
import pytest

from forerun.calib.answers.run_measurements import Measurements
from forerun.calib.errors import CalibrationError
from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.record_kinds import (
    CollectiveRecord,
    OperatorRecord,
    PhaseRecord,
    Record,
    StepRecord,
)
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import SampleTable, build_table
from forerun.calib.workload.collectives import Collective, GroupRole

# The times that conftest.py plants.
LINEAR_S, TRANSFER_S, LATE_S, STEP_REST_S = 300e-6, 200e-6, 70e-6, 400e-6
HOST_S = 50e-6 + 30e-6  # within a pass, and what the schedule does between two
OPTIMIZER_S = 2e-3
FLAGGED_STEP = 7
TIGHT = 1e-9


@pytest.fixture
def run(write_run) -> RunRecords:
    return read_run(write_run())


def _with(run: RunRecords, change) -> RunRecords:
    records = {rank: tuple(change(rank, r) for r in result) for rank, result in run.records.items()}
    return replace(run, records=records)


def _row(table: SampleTable, kind: str) -> pd.Series:
    rows = table.samples[table.samples["kind"] == kind]
    assert len(rows) == 1
    return rows.iloc[0]


def test_planted_times_come_back(run: RunRecords) -> None:
    table = build_table(run)
    linear = _row(table, "linear_fc1")
    assert linear["time_s"] == pytest.approx(LINEAR_S, rel=TIGHT)
    assert (linear["phase"], linear["shape"], linear["element_nbytes"]) == (
        "forward",
        "256x256x512",
        4,
    )
    assert (linear["count"], linear["num_steps"], linear["num_seen"]) == (20, 5, 2)
    assert linear["spread_log"] == pytest.approx(0.0, abs=1e-12)
    assert _row(table, "host_microbatch")["time_s"] == pytest.approx(HOST_S, rel=TIGHT)
    assert _row(table, "host_step")["time_s"] == pytest.approx(STEP_REST_S, rel=TIGHT)


def test_transfer_is_the_minimum_over_the_group_and_the_rest_is_skew(run: RunRecords) -> None:
    table = build_table(run)
    row = _row(table, "all_reduce")
    assert row["time_s"] == pytest.approx(TRANSFER_S, rel=TIGHT)
    assert (row["role"], row["num_ranks"], row["nbytes"]) == ("tp", 2, 262_144)
    assert not row["is_bound"]
    assert Measurements(table=table).skew_s == pytest.approx({0: 2 * LATE_S, 1: 0.0})
    assert table.skew["role"].unique().tolist() == [GroupRole.TP.value]


def test_a_step_that_one_rank_flagged_is_left_out_on_all(run: RunRecords) -> None:
    table = build_table(run)
    flagged = table.steps[table.steps["step"] == FLAGGED_STEP]
    assert flagged["is_clean"].tolist() == [False, False]
    assert flagged["flags"].tolist() == ["collected", ""]
    clean = Measurements(table=table).clean_steps
    assert clean["step"].nunique() == 9
    assert len(Measurements(table=table).bare_s) == 4
    assert clean["time_s"].max() < 4e-3


def test_one_slow_step_does_not_move_the_time(run: RunRecords) -> None:
    def slow(rank: int, record: Record) -> Record:
        if isinstance(record, OperatorRecord) and record.step == 2:
            return replace(record, duration_ns=record.duration_ns * 50)
        return record

    row = _row(build_table(_with(run, slow)), "linear_fc1")
    assert row["time_s"] == pytest.approx(LINEAR_S, rel=TIGHT)


def test_a_step_pays_the_mean_of_its_events(run: RunRecords) -> None:
    def second_is_slower(rank: int, record: Record) -> Record:
        if isinstance(record, OperatorRecord) and record.microbatch == 1:
            return replace(record, duration_ns=record.duration_ns * 2)
        return record

    row = _row(build_table(_with(run, second_is_slower)), "linear_fc1")
    assert row["time_s"] == pytest.approx(1.5 * LINEAR_S, rel=TIGHT)


def test_exact_transfers_win_over_bounds(run: RunRecords) -> None:
    def bound(rank: int, record: Record) -> Record:
        if isinstance(record, CollectiveRecord) and record.sequence == 0:
            return replace(record, is_bound=True, duration_ns=record.duration_ns * 9)
        return record

    row = _row(build_table(_with(run, bound)), "all_reduce")
    assert row["time_s"] == pytest.approx(TRANSFER_S, rel=TIGHT)
    assert (row["count"], bool(row["is_bound"])) == (5, False)


def test_a_missing_rank_makes_a_transfer_a_bound(write_run) -> None:
    row = _row(build_table(read_run(write_run(ranks=[0]))), "all_reduce")
    assert bool(row["is_bound"])
    assert row["time_s"] == pytest.approx(TRANSFER_S + LATE_S, rel=TIGHT)


def test_a_send_is_matched_with_the_receive_of_its_peer(run: RunRecords) -> None:
    def pair(rank: int, record: Record) -> Record:
        if not isinstance(record, CollectiveRecord):
            return record
        kind = Collective.SEND if rank == 0 else Collective.RECV
        length = 90_000 if rank == 0 else 500_000
        return replace(
            record,
            collective=kind,
            role=GroupRole.PP,
            peer=1 - rank,
            duration_ns=length,
            exposed_ns=length,
        )

    table = build_table(_with(run, pair))
    row = _row(table, "send")
    assert (row["time_s"], row["num_ranks"]) == (pytest.approx(90e-6), 2)
    assert not row["is_bound"]
    assert Measurements(table=table).skew_s == pytest.approx({0: 0.0, 1: 2 * 410e-6})


def test_the_optimizer_operator_takes_its_waits_with_it(run: RunRecords) -> None:
    def waits(rank: int, record: Record) -> Record:
        if isinstance(record, PhaseRecord) and record.name == "optimizer":
            return replace(record, wait_ns=500_000)
        return record

    table = build_table(_with(run, waits))
    assert _row(table, "host_step")["time_s"] == pytest.approx(STEP_REST_S, rel=TIGHT)
    total = table.phases[table.phases["name"] == "optimizer"]
    assert total["time_s"].unique() == pytest.approx([OPTIMIZER_S])
    assert total["wait_s"].unique() == pytest.approx([500e-6])


@pytest.mark.slow
def test_order_of_arrival_changes_nothing(run: RunRecords) -> None:
    shuffler = random.Random(3)
    shuffled = {}
    for rank in (1, 0):
        records = list(run.records[rank])
        shuffler.shuffle(records)
        shuffled[rank] = tuple(records)
    other = build_table(replace(run, records=shuffled))
    table = build_table(run)
    assert other.sha256 == table.sha256
    assert other.equals(table)


@pytest.mark.slow
def test_windows_add_rows_and_a_window_read_again_does_not(run: RunRecords) -> None:
    table = build_table(run)

    def later(rank: int, record: Record) -> Record:
        return replace(record, window=1) if hasattr(record, "window") else record

    next_window = build_table(_with(run, later))
    both = SampleTable.concat([table, next_window])
    assert sorted(both.samples["window"].unique()) == [0, 1]
    assert len(both.samples) == 2 * len(table.samples)
    assert SampleTable.concat([both, table, next_window]).equals(both)


def test_everything_later_commands_need_is_in_the_table(run: RunRecords, config) -> None:
    table = build_table(run)
    assert table.config() == config
    assert table.run_id == "run-a"
    assert Measurements(table=table).memory_peak_nbytes == 1001
    assert table.windows["num_dropped"].tolist() == [0, 1]
    assert table.coverage[["rank", "installed", "fired"]].to_numpy().tolist() == [
        [0, 4, 4],
        [1, 4, 4],
    ]


def test_a_run_that_stopped_early_gives_a_table_without_samples(run: RunRecords) -> None:
    for kinds in ((), (StepRecord,), (StepRecord, OperatorRecord), (StepRecord, PhaseRecord)):
        records = {
            rank: tuple(r for r in result if isinstance(r, kinds))
            for rank, result in run.records.items()
        }
        table = build_table(replace(run, records=records))
        assert len(table.runs) == 2
        assert ("linear_fc1" in set(table.samples["kind"])) == (OperatorRecord in kinds)
        assert "host_microbatch" not in set(table.samples["kind"])
    with pytest.raises(CalibrationError, match="no sample tables"):
        SampleTable.concat([])
