"""``status --watch`` beside a real companion that is told of steps, and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from companion_settings import started
from json_schema import check

from forerun.launch.companion import _status_writer as status_writer
from forerun.launch.verbs.arguments import FOLDER, ExitCode

SCHEMA = json.loads((FOLDER / "status.schema.json").read_text())
FASTER = "from forerun.launch.companion import _status_writer; _status_writer.EVERY_S = 0.05"
WATCH = (sys.executable, "-m", "forerun", "status", "--watch")


def step(number: int, time_s: float = 0.5, **more: Any) -> str:
    event = {"event": "step", "step": number, "time_s": time_s, "unix_s": time.time(), **more}
    return json.dumps(event) + "\n"


def status_file(home: Path) -> dict[str, Any]:
    return json.loads((home / "runs" / "ours" / "status.json").read_text())


def await_steps(home: Path, iteration: int) -> dict[str, Any]:
    for _ in range(6000):  # the companion may have died
        try:
            if (value := status_file(home))["iteration"] >= iteration:
                return value
        except FileNotFoundError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"no status of step {iteration} in {home}")


@pytest.fixture
def companion(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = started(tmp_path, launch_id="ours", before=FASTER)
    yield process
    process.kill()
    process.communicate()


def send(process: subprocess.Popen[str], *lines: str) -> None:
    assert process.stdin is not None
    process.stdin.write("".join(lines))
    process.stdin.flush()


def test_the_file_holds_what_was_told(companion: subprocess.Popen[str], tmp_path: Path) -> None:
    """Hooked and flagged steps count as done, and not for the time of a step."""
    send(companion, *(step(n, 0.5 + 0.01 * n) for n in range(21)))
    send(companion, step(21, 9.0, is_hooked=True), step(22, 9.0, flags=["saved"]))
    value = await_steps(tmp_path, 23)
    assert (value["phase"], value["num_steps"], value["iteration"]) == ("runs", 21, 23)
    assert value["step_time_s"] == pytest.approx(0.6)
    assert (value["step_low_s"], value["step_high_s"]) == pytest.approx((0.51, 0.69))
    assert json.loads((tmp_path / "latest" / "status.json").read_text())["run_id"] == "golden-run"


@pytest.mark.parametrize("has_word", [True, False])
def test_a_watch_ends_with_the_run(
    companion: subprocess.Popen[str], tmp_path: Path, has_word: bool
) -> None:
    send(companion, step(0))
    await_steps(tmp_path, 1)
    watching = subprocess.Popen(
        [*WATCH, str(tmp_path), "--json"], stdout=subprocess.PIPE, text=True
    )
    assert watching.stdout is not None and companion.stdin is not None
    first = json.loads(watching.stdout.readline())
    send(companion, step(1), step(2), '{"event": "end", "step": 2}\n' if has_word else "")
    companion.stdin.close()
    companion.stdin = None
    values = [first, *map(json.loads, watching.communicate()[0].splitlines())]
    assert watching.returncode == 0
    for value in values:
        check(value, SCHEMA)
    runs = [run for value in values for run in value["runs"]]
    assert (runs[0]["state"], runs[0]["iteration"]) == ("live", 1)
    assert (runs[-1]["state"], runs[-1]["iteration"]) == ("ended" if has_word else "lost", 3)
    shown_runs = [
        {name: field_value for name, field_value in run.items() if name != "age_s"} for run in runs
    ]
    assert all(one != two for one, two in pairwise(shown_runs))


@pytest.mark.slow
@pytest.mark.parametrize("has_directory", [False, True])
def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path, has_directory: bool) -> None:
    home = tmp_path / "later"
    if has_directory:
        home.mkdir()
    watching, other = (
        subprocess.Popen(
            [*WATCH, str(home)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    )
    assert watching.stderr is not None and other.stderr is not None
    assert "waiting for a run" in watching.stderr.readline()
    assert "waiting for a run" in other.stderr.readline()
    other.send_signal(signal.SIGINT)
    assert other.communicate() == ("", "") and other.returncode == ExitCode.NO_DATA
    home.mkdir(exist_ok=True)
    companion = started(home, launch_id="ours", before=FASTER)
    send(companion, step(0))
    await_steps(home, 1)
    send(companion, '{"event": "end", "step": 0}\n')
    companion.communicate()
    out, err = watching.communicate()
    assert (watching.returncode, err) == (ExitCode.ANSWER, "") and "ours: ended" in out


def test_ctrl_c_ends_a_watch_in_peace(companion: subprocess.Popen[str], tmp_path: Path) -> None:
    send(companion, step(0))
    await_steps(tmp_path, 1)
    watching = subprocess.Popen(
        [*WATCH, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert watching.stdout is not None
    line = watching.stdout.readline()
    assert line.startswith("ours: live · step 1 · 0.500 s per step") and "\x1b" not in line
    watching.send_signal(signal.SIGINT)
    out, err = watching.communicate()
    assert (watching.returncode, out, err) == (0, "", "")


def test_a_terminal_is_drawn_anew(companion: subprocess.Popen[str], tmp_path: Path) -> None:
    send(companion, step(0))
    await_steps(tmp_path, 1)
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    watching = subprocess.Popen([*WATCH, str(tmp_path)], stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    shown = b""
    while b"live" not in shown:  # the cursor is hidden first
        shown += os.read(ours, 4096)
    send(companion, step(1), '{"event": "end", "step": 1}\n')
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # the other side is closed
        pass
    os.close(ours)
    assert watching.wait() == 0
    assert b"run golden-run: live" in shown and b"run golden-run: ended" in shown
    assert b"\x1b[1A" in shown or b"\x1b[2K" in shown


def test_a_file_is_not_written_more_often_than_every_five_seconds() -> None:
    assert status_writer.EVERY_S >= 5.0
