"""Time that Slurm grants, from recorded text, and from a real Slurm if it can be started."""

from __future__ import annotations

import calendar
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_slurm import LocalSlurm, is_installed, local_slurm

from forerun.launch.batch_text import time_option
from forerun.launch.wrapper.slurm import (
    Allocation,
    allocation,
    duration_s,
    from_scontrol,
    num_jobs,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "slurm"
"""Printed by Slurm 22.05.8; names and paths changed."""
NOW = 1_772_420_000.0
DAY_S = 86400.0


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def moment(text: str) -> float:
    return float(calendar.timegm(datetime.fromisoformat(text).timetuple()))


def nobody(command: Sequence[str]) -> str | None:
    return None


def test_scontrol_tells_start_and_limit(utc: None) -> None:
    allocation = from_scontrol((GOLDEN / "limit.txt").read_text(), "1")
    assert allocation is not None and allocation.length_s == 26 * 3600
    assert allocation.start_unix_s == moment("2026-11-22T00:22:58")
    assert allocation.end_unix_s == moment("2026-11-23T02:22:58")


def test_a_job_without_a_limit_has_no_end(utc: None) -> None:
    allocation = from_scontrol((GOLDEN / "unlimited.txt").read_text(), "2")
    assert (
        allocation is not None and allocation.end_unix_s is None and allocation.source == "scontrol"
    )


def test_the_name_of_a_job_is_not_read_as_its_limit(utc: None) -> None:
    text = (GOLDEN / "limit.txt").read_text()
    named = text.replace("JobName=job.sh", "JobName=a TimeLimit=9 StartTime=x EndTime b")
    assert from_scontrol(named, "1") == from_scontrol(text, "1")


@pytest.mark.parametrize(
    ("start", "end", "length_s"),
    [  # Pairs that real jobs had in their environment.
        ("1772410138", "1772453338", 12 * 3600.0),
        ("1707980510", "1707981410", 900.0),
        ("1741333291", "1772869291", None),  # a year: Slurm's word for no limit
    ],
)
def test_the_environment_goes_before_questions(
    start: str, end: str, length_s: float | None
) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_START_TIME": start, "SLURM_JOB_END_TIME": end}

    def never(command: Sequence[str]) -> str | None:
        raise AssertionError(command)

    result = allocation(environ, NOW, never)
    assert (result.length_s, result.source) == (length_s, "SLURM_JOB_END_TIME")


def test_a_changed_limit_is_asked_for_and_absent_tools_keep_the_old_one(utc: None) -> None:
    environ = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_START_TIME": "1772410138",
        "SLURM_JOB_END_TIME": "1772453338",
    }
    shown = (GOLDEN / "limit.txt").read_text()
    newer = allocation(environ, NOW, lambda command: shown, is_anew=True)
    assert newer.end_unix_s == moment("2026-11-23T02:22:58")
    assert allocation(environ, NOW, nobody, is_anew=True).end_unix_s == 1772453338


def test_squeue_is_the_last_resort() -> None:
    def only_squeue(command: Sequence[str]) -> str | None:
        return "1-02:00:00\n" if command[0] == "squeue" else None

    result = allocation({"SLURM_JOB_ID": "7"}, NOW, only_squeue)
    assert result == Allocation(job_id="7", end_unix_s=NOW + 26 * 3600, source="squeue")


@pytest.mark.parametrize(
    ("environ", "job_id"), [({}, ""), ({"SLURM_JOB_ID": "7"}, "7"), ({"SLURM_JOBID": "7"}, "7")]
)
def test_where_nobody_answers_nothing_is_made_up(environ: Mapping[str, str], job_id: str) -> None:
    assert allocation(environ, NOW, nobody) == Allocation(job_id=job_id)


def test_words_that_are_no_time_are_none() -> None:
    assert all(math.isnan(duration_s(text)) for text in ("", "NOT_SET", "INVALID", "1:2:3:4", "x"))


@given(st.floats(1.0, 30 * DAY_S))
def test_the_suggested_time_holds_and_wastes_less_than_a_quarter_hour(time_s: float) -> None:
    assert time_s <= duration_s(time_option(time_s)) < time_s + 900.0 + 1e-6


@given(st.floats(1.0, 1e7), st.floats(60.0, 1e6), st.floats(0.0, 1e5))
def test_a_chain_is_long_enough_and_not_a_job_longer(
    remaining_s: float, job_s: float, lost_s: float
) -> None:
    count = num_jobs(remaining_s, job_s, lost_s)
    if count is None:
        assert job_s <= lost_s
    else:
        assert (count - 1) * (job_s - lost_s) < remaining_s * (1 + 1e-9)
        assert count * (job_s - lost_s) >= remaining_s * (1 - 1e-9)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSlurm]:
    if not is_installed():
        pytest.skip("needs root and Debian's slurmctld, slurmd and slurm-client")
    with local_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


RUN = f"exec {sys.executable} -m forerun.launch.cli run"
STOP = """
import json, os, pathlib
launch = os.environ["FORERUN_LAUNCH_ID"]
home = pathlib.Path("out/runs") / launch; home.mkdir(parents=True)
value = {"launch_id": launch, "iteration": 30, "reason": "faster elsewhere", "rule": "restart"}
(home / "stop.json").write_text(json.dumps(value))
"""


@pytest.mark.slow
def test_in_a_real_job_the_limit_is_seen_and_the_code_arrives(slurm: LocalSlurm) -> None:
    (slurm.home / "stop.py").write_text(STOP)
    job = slurm.submit(
        f"{RUN} --directory=out -- {sys.executable} stop.py", "--time=1-02:00:00", "-o", "limit.out"
    )
    fields = slurm.end_of(job)
    assert fields["ExitCode"] == "93:0"
    output = (slurm.home / "limit.out").read_text()
    assert "limit in 26.00 h (scontrol)" in output or "limit in 26.00 h (SLURM_JOB_END" in output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["", "srun "])
def test_the_warning_of_a_real_slurm_lets_workers_save(slurm: LocalSlurm, launcher: str) -> None:
    pids = slurm.home / f"pids{launcher.strip()}"
    fake = Path(__file__).parents[2] / "support" / "fake_launcher.py"
    command = f"{launcher}{sys.executable} -S {fake} {pids} saving"
    job = slurm.submit(f"{RUN} --grace=9s -- {command}", "-o", f"{pids.name}.out")
    end = time.monotonic() + 60.0
    while not pids.exists() or pids.read_text().count("\n") < 2:
        assert time.monotonic() < end
        time.sleep(0.1)
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    fields = slurm.end_of(job)
    assert fields["JobState"] == "FAILED" and fields["ExitCode"] == "1:0"
    assert pids.with_name(f"{pids.name}.saved").read_text().count("saved") == 2
    assert "no time limit (scontrol)" in (slurm.home / f"{pids.name}.out").read_text()
    assert not [pid for pid in pids.read_text().split() if Path(f"/proc/{pid}").exists()]
