"""The report on waiting: a planted straggler in the records of a real run, in every form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.calib.answers.analysis import analyse
from forerun.calib.answers.answer import Answer
from forerun.calib.answers.request import Request
from forerun.calib.records.record_kinds import CollectiveRecord, PhaseRecord, Record
from forerun.calib.samples.store import read_run, write_table
from forerun.calib.samples.table import build_table
from forerun.launch.cli import ExitCode, main
from forerun.launch.views.answer_tables import tables_of
from forerun.launch.views.answers import SAMPLES

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
EXTRA_NS = 200_000_000
AHEAD_NS = 5_000_000_000


def changed(record: Record) -> Record:
    """Rank 1 on another host, and slow at forward passes."""
    if isinstance(record, CollectiveRecord):
        return replace(record, issue_ns=record.issue_ns + AHEAD_NS)
    if isinstance(record, PhaseRecord) and record.name == "forward-compute":
        return replace(record, duration_ns=record.duration_ns + EXTRA_NS)
    return record


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = read_run(GOLDEN)
    slow = {**run.records, 1: tuple(map(changed, run.records[1]))}
    home = tmp_path_factory.mktemp("waiting")
    write_table(home / SAMPLES, build_table(replace(run, records=slow)))
    return home


def test_json_names_the_rank_its_cost_and_its_clock(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(directory), "--json"]) == ExitCode.ANSWER
    value = json.loads(capsys.readouterr().out)
    (slow,) = value["waiting"]["slow"]
    assert (slow["ranks"], slow["stage"], slow["kind"]) == ([1], 0, "compute")
    passes = read_run(GOLDEN).configs[0].num_microbatches
    assert slow["cost_s"] == pytest.approx(passes * EXTRA_NS / 1e9, rel=0.1)
    (clock,) = value["waiting"]["clocks"]
    assert clock["rank"] == 1 and clock["low_s"] <= AHEAD_NS / 1e9 <= clock["high_s"]
    lines = [line for line in value["decision"]["transcript"] if "slow:" in line]
    assert len(lines) == 1 and lines[0].startswith("[forerun] slow: rank 1 (stage 0) · each step ")
    assert lines[0].endswith("cause: compute")


def test_the_report_shows_waiting_and_who_is_slow(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(directory)]) == ExitCode.ANSWER
    brief = capsys.readouterr().out.splitlines()
    assert len(brief) <= 27 and "slow: rank 1" in "\n".join(brief)
    assert brief[-1].endswith(f"forerun report {directory} --full")
    assert main(["report", str(directory), "--full"]) == ExitCode.ANSWER
    out = capsys.readouterr().out
    assert "Waiting: stragglers, which hold up the others" in out
    assert "Waiting: how far clocks are ahead of the first rank's" in out
    assert "Stragglers: " not in out


@pytest.fixture(scope="module")
def steady() -> Answer:
    return analyse(build_table(read_run(GOLDEN)), Request(now_unix_s=2e9))


def test_no_two_columns_of_a_table_have_one_name(steady: Answer) -> None:
    """W&B takes a row as a mapping: of two columns with one name it would show one."""
    for table in tables_of(steady):
        assert len(set(table.columns)) == len(table.columns), table.key
        assert {len(row) for row in table.rows} == {len(table.columns)}
