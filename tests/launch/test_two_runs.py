"""Launches that share a directory: each owns what it wrote, nothing of another commands it.

Which of them ``latest`` links to depends on whose first answer is the newest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_training as script
from launched import Launch

from forerun.launch.cli import main

pytestmark = pytest.mark.slow
PATIENCE_S = 240.0
PLANTED = ("stop-request.json", "stop.json", "forecast.json")


def launch(home: Path, *more: str, go: str, **environ: str) -> Launch:
    """The training under torchrun."""
    words = ("--standalone", script.__file__, "out", go, *more)
    # The first outlives the whole of the second.
    return Launch(home, *words, num_workers=1, timeout_s=580.0, WANDB_MODE="disabled", **environ)


def output_of(launched: Launch) -> str:
    """Wait for a launch's end and return its output."""
    done = launched.end_well()
    return done.stdout + done.stderr


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def object_in(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def plant(out: Path, launch_id: str) -> None:
    """Orders and forecasts of another launch, newer than all that is to come."""
    for folder in (out, out / "runs" / "another", out / "runs" / launch_id):
        folder.mkdir(parents=True, exist_ok=True)
        value = {
            **{"schema": 1, "launch_id": "another", "run_id": "r", "unix_s": time.time() + 9999.0},
            **{"rule": "request", "reason": "planted", "iteration": 3, "step_time_s": 1.0},
        }
        for name in PLANTED:
            (folder / name).write_text(json.dumps(value))


def command_lines_below(pid: int) -> list[bytes]:
    """Return the command lines of all processes that descend from this one."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    below, results = {pid}, []
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    for child in below - {pid}:
        try:
            results.append(Path(f"/proc/{child}/cmdline").read_bytes())
        except OSError:
            continue
    return results


def test_each_of_three_launches_owns_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    plant(out, "first")
    # More than one argument may hold, and nothing that other users may read.
    shards = [f"--data-path=/shards/secret-{number:08d}-{'x' * 250}" for number in range(1100)]
    first = launch(tmp_path, *shards, go="go-1", FORERUN_LAUNCH_ID="first")
    wait_until(lambda: (out / "latest" / "report.html").exists())
    (companion,) = [
        line for line in command_lines_below(first.ancestor) if b"forerun.companion" in line
    ]
    assert b"secret" not in companion and len(companion) < 1000

    (tmp_path / "go-2").touch()
    second_output = output_of(launch(tmp_path, go="go-2"))
    (second,) = [p for p in (out / "runs").iterdir() if p.name not in ("first", "another")]
    assert "report: out/latest/report.html" in second_output
    assert (out / "latest").readlink() == Path("runs", second.name)
    (tmp_path / "go-1").touch()
    first_output = output_of(first)
    assert "DONE" in first_output and "STOPPED" not in first_output
    assert "report: out/latest/report.html" in first_output, "before the second began"
    assert (out / "latest").readlink() == Path("runs", second.name)
    for folder in (out / "runs" / "first", second):
        decision = object_in(folder / "decision.json")
        assert decision["launch_id"] == folder.name
        assert object_in(folder / "score.json")["run_id"] == decision["run_id"]
        assert decision["run_id"] in object_in(folder / "launch.json")["run_ids"]

    reports = {p: p.read_bytes() for p in (out / "runs").glob("*/report.*")}
    third_output = output_of(launch(tmp_path, go="go-2"))
    assert "report: out/latest/report.html" in third_output
    third = (out / "latest").readlink().name
    assert third not in ("first", second.name)
    assert object_in(out / "latest" / "decision.json")["launch_id"] == third
    # Where there is time for it, a companion also keeps its fit for the first question.
    files = {p.name for p in out.iterdir() if p.is_file() and not p.match("fit-*.npz")}
    assert files == {*PLANTED, "forecasts.jsonl"}
    assert reports == {p: p.read_bytes() for p in reports} and len(reports) == 2

    runs = {
        object_in(out / "runs" / name / "decision.json")["run_id"]: out / "runs" / name
        for name in ("first", second.name, third)
    }
    assert len(runs) == 3
    newest = object_in(out / "latest" / "decision.json")["run_id"]
    earlier, second_run_id = (
        next(r for r in runs if runs[r].name == n) for n in ("first", second.name)
    )
    for words, run_id in [
        (("report", str(out)), newest),
        (("report", str(out), "--run-id", earlier), earlier),
        (("report", str(out / "latest")), newest),
        (("report", str(second)), second_run_id),
        (("plan", str(second)), second_run_id),
    ]:
        main([*words, "--json"])
        value = json.loads(capsys.readouterr().out)
        assert value["run_id"] == run_id
        assert words[0] == "plan" or value["track"]["run_id"] == run_id
