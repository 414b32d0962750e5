"""``status`` on planted files: what becomes of a run, and that no file of a directory ends it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from json_schema import check

from forerun.hooks.process.launch_identity import process_start
from forerun.launch.cli import ExitCode, main
from forerun.launch.store.status_file import STALE_S, this_host
from forerun.launch.verbs.arguments import FOLDER
from forerun.launch.verbs.status import RunStatus, State, run_statuses, status_line

NOW = 2e9
SCHEMA = json.loads((FOLDER / "status.schema.json").read_text())
ENDED = Path(__file__).parents[2] / "golden" / "megatron_forecasts"
Out = pytest.CaptureFixture[str]
FORECAST = {
    **{"now_unix_s": NOW - 30.0, "steps_done": 40, "steps_left": 160, "step_time_s": 1.0},
    **{"single_low_s": 0.9, "single_high_s": 1.2},
    **{"finish_p50_unix_s": NOW + 130.0, "finish_p95_unix_s": NOW + 150.0},
}
DECISION = {
    "action": "continue",
    "reasons": [
        {"rule": "deadline", "is_met": False, "probability": 0.1, "text": "far"},
        {"rule": "restart", "is_met": False, "probability": 0.4, "text": "near"},
    ],
}


def put(folder: Path, name: str, value: dict[str, Any], run_id: str = "r1") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"schema": 1, "run_id": run_id, "launch_id": folder.name, **value}
    (folder / name).write_text(json.dumps(whole))


def launch(home: Path, name: str = "one", **status: Any) -> Path:
    """A launch of run r1 that this very process writes the status of, and its files."""
    folder = home / "runs" / name
    put(folder, "launch.json", {"run_ids": ["r0", "r1"]})
    pid = os.getpid()
    value = {
        **{"phase": "runs", "iteration": 70, "step_time_s": 1.1, "step_low_s": 1.0},
        **{"step_high_s": 1.3, "num_steps": 50, "heard_unix_s": NOW - 2.0, "unix_s": NOW - 1.0},
        **{"host": this_host(), "pid": pid, "pid_start": process_start(pid), **status},
    }
    put(folder, "status.json", value)
    put(folder, "forecast.json", FORECAST)
    put(folder, "decision.json", DECISION)
    return folder


def only(home: Path, now_unix_s: float = NOW) -> RunStatus:
    (run_status,), problems = run_statuses(home, now_unix_s)
    assert not problems
    return run_status


def test_a_live_run_says_where_it_is_and_when_it_ends(tmp_path: Path) -> None:
    launch(tmp_path)
    run_status = only(tmp_path)
    assert (run_status.state, run_status.iteration, run_status.steps_total) == (State.LIVE, 70, 200)
    assert (run_status.step_time_s, run_status.step_low_s, run_status.step_high_s) == (
        1.1,
        1.0,
        1.3,
    )
    assert (run_status.finish_p50_unix_s, run_status.finish_p95_unix_s) == (
        NOW + 130.0,
        NOW + 150.0,
    )
    assert (run_status.decision, run_status.reason, run_status.age_s) == ("continue", "near", 2.0)
    words = ("step 70 of 200 (35 %)", "decision: keep running", "last update 2 s ago")
    assert all(text in status_line(run_status).split(" · ") for text in words)


@pytest.mark.parametrize(
    ("status_fields", "state"),
    [
        ({"phase": "ended", "iteration": 200}, State.ENDED),
        ({"phase": "ended"}, State.STOPPED),
        ({"phase": "gone"}, State.LOST),
        ({"phase": "gone", "iteration": 200}, State.ENDED),
        ({"pid_start": 1}, State.LOST),
        ({"pid": 0}, State.LOST),
        ({"host": "elsewhere"}, State.LIVE),
        ({"host": "elsewhere", "unix_s": NOW - STALE_S - 1.0}, State.LOST),
        ({"phase": "new"}, State.LOST),
    ],
)
def test_what_has_become_of_a_run(
    status_fields: dict[str, Any], state: State, tmp_path: Path
) -> None:
    launch(tmp_path, **status_fields)
    run_status = only(tmp_path)
    assert run_status.state is state
    assert (run_status.finish_p50_unix_s is not None) == (state is State.LIVE)


def test_a_run_that_was_told_to_stop_is_stopped(tmp_path: Path, capsys: Out) -> None:
    folder = launch(tmp_path, phase="gone")
    put(folder, "stop.json", {"reason": "TP2 ends sooner", "rule": "restart"})
    put(folder, "decision.json", {**DECISION, "action": "stop"})
    run_status = only(tmp_path)
    assert (run_status.state, run_status.reason) == (State.STOPPED, "TP2 ends sooner")
    assert main(["status", str(tmp_path)]) == ExitCode.THRESHOLD


def test_the_newest_drift_of_the_run_is_told(tmp_path: Path) -> None:
    lines = [("r1", "drift: first"), ("r1", "drift: second"), ("r0", "drift: of another")]
    folder = launch(tmp_path)
    put(folder, "drift.json", {"events": [{"run_id": r, "line": line} for r, line in lines]})
    assert only(tmp_path).drift == "drift: second"


def test_files_of_an_earlier_run_of_a_launch_say_nothing(tmp_path: Path) -> None:
    folder = launch(tmp_path)
    for name, value in (("forecast.json", FORECAST), ("decision.json", DECISION)):
        put(folder, name, value, run_id="r0")
    run_status = only(tmp_path)
    assert (run_status.iteration, run_status.steps_total) == (70, None)
    assert (run_status.finish_p50_unix_s, run_status.decision) == (None, None)


def test_each_launch_is_a_line_and_one_can_be_named(tmp_path: Path, capsys: Out) -> None:
    launch(tmp_path, "one", phase="ended", iteration=200)
    put(launch(tmp_path, "two"), "launch.json", {"run_ids": ["r1"]})
    os.utime(tmp_path / "runs" / "one" / "launch.json", (1.0, 1.0))
    assert main(["status", str(tmp_path)]) == ExitCode.ANSWER
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" · ")[0] for line in lines] == ["one: ended", "two: live"]
    for name in ("one", "r0"):
        (run_status,), _ = run_statuses(tmp_path, NOW, name)
        assert run_status.launch_id == "one"
    (run_status,), _ = run_statuses(tmp_path / "runs" / "two", NOW)
    assert run_status.launch_id == "two"
    assert main(["status", str(tmp_path), "--run-id", "three"]) == ExitCode.NO_DATA
    assert "no run three" in capsys.readouterr().err


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b"1" * 5000])
@pytest.mark.parametrize("name", ["status.json", "forecast.json", "decision.json", "drift.json"])
def test_a_damaged_file_is_named_and_skipped(
    name: str, text: bytes, tmp_path: Path, capsys: Out
) -> None:
    folder = launch(tmp_path)
    (folder / name).write_bytes(text)
    assert main(["status", str(tmp_path), "--json"]) == ExitCode.ANSWER
    value = json.loads(capsys.readouterr().out)
    check(value, SCHEMA)
    (problem,) = value["problems"]
    assert str(folder / name) in problem and "delete it" in problem


WRONG: tuple[Any, ...] = (None, True, -1, 1e400, 10**30, "text", [], {}, [{}], [[]])


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_value_of_another_kind_is_as_if_it_were_not_there(
    value: Any, tmp_path: Path, capsys: Out
) -> None:
    folder = launch(tmp_path)
    for name in ("status.json", "forecast.json", "decision.json"):
        whole = json.loads((folder / name).read_text())
        keys = [key for key in whole if key not in ("run_id", "launch_id")]
        (folder / name).write_text(json.dumps({**whole, **dict.fromkeys(keys, value)}))
    put(folder, "drift.json", {"events": value})
    put(folder, "stop.json", {"reason": value})
    assert main(["status", str(tmp_path), "--json"]) == ExitCode.ANSWER
    check(json.loads(capsys.readouterr().out), SCHEMA)
    assert main(["status", str(tmp_path)]) == ExitCode.ANSWER


def test_answers_of_before_there_were_launches_are_read(capsys: Out) -> None:
    assert main(["status", str(ENDED), "--json"]) == ExitCode.ANSWER
    value = json.loads(capsys.readouterr().out)
    check(value, SCHEMA)
    (run,) = value["runs"]
    assert run["state"] == "ended" and run["iteration"] == run["steps_total"]


def test_the_age_is_counted_from_the_last_word(tmp_path: Path) -> None:
    launch(tmp_path, heard_unix_s=time.time() - 100.0)
    assert 100.0 <= (only(tmp_path, time.time()).age_s or 0.0) < 200.0


@pytest.mark.parametrize(("age_s", "state"), [(1.0, State.LIVE), (STALE_S + 1.0, State.LOST)])
def test_a_launch_that_has_only_its_folder_is_not_lost_yet(
    tmp_path: Path, age_s: float, state: State
) -> None:
    """A companion makes the folder, then claims the directory, then says that it runs."""
    folder = tmp_path / "runs" / "one"
    put(folder, "launch.json", {"run_ids": ["r1"]})
    os.utime(folder / "launch.json", (NOW - age_s, NOW - age_s))
    (run_status,), problems = run_statuses(tmp_path, NOW)
    assert (run_status.state, run_status.iteration, problems) == (state, None, [])
