"""The pipe to a real process that reads, sleeps, dies, or is not there."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.hooks.control import companion_link
from forerun.hooks.control.companion_link import LOOK_S, CompanionPipe

ECHO = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
DEAF = "import sys, time; time.sleep(60)"


def start(program: str, *arguments: str) -> CompanionPipe:
    pipe = CompanionPipe()
    pipe.start((sys.executable, "-c", program, *arguments), {"PATH": ""}, {})
    return pipe


def eventually(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 20
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def test_events_arrive_as_lines_in_order(tmp_path: Path) -> None:
    pipe = start(ECHO, str(tmp_path / "out"))
    for number in range(3):
        pipe.send({"event": "step", "step": number})
    pipe.close()
    assert (tmp_path / "out").read_text().splitlines() == [
        f'{{"event": "step", "step": {n}}}' for n in range(3)
    ]


def test_the_companion_is_the_first_that_the_kernel_ends(tmp_path: Path) -> None:
    pipe = start(f"print(open('/proc/self/oom_score_adj').read()); {ECHO}", str(tmp_path / "out"))
    assert pipe._process is not None
    score = Path(f"/proc/{pipe._process.pid}/oom_score_adj")
    assert (
        score.read_text() == "1000\n" and Path("/proc/self/oom_score_adj").read_text() != "1000\n"
    )
    pipe.close()


def test_without_memory_no_companion_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(companion_link, "free_nbytes", lambda: 40 << 20)
    pipe = start(ECHO, str(tmp_path / "out"))
    assert not pipe.is_alive and not (tmp_path / "out").exists()
    assert "40 MiB are free within this job's memory limit" in caplog.text
    pipe.send({"event": "step"})
    pipe.close()


def test_a_full_pipe_drops_whole_events_and_never_waits() -> None:
    pipe = start(DEAF)
    process = pipe._process
    for _ in range(3000):
        pipe.send({"event": "step", "padding": "x" * 100})
    assert 0 < pipe.num_dropped < 3000
    process.kill()
    pipe.close()


def test_the_end_of_a_window_is_not_lost_in_a_full_pipe(tmp_path: Path) -> None:
    wait = "import os, time\nwhile not os.path.exists(sys.argv[2]): time.sleep(0.01)\n"
    pipe = start(ECHO.replace("; ", f"; {wait}", 1), str(tmp_path / "out"), str(tmp_path / "go"))
    for _ in range(3000):
        pipe.send({"event": "step", "padding": "x" * 100})
    pipe.send({"event": "window_closed", "window": 7})
    (tmp_path / "go").touch()
    assert eventually(lambda: pipe.send({"event": "step"}) or not pipe._late)
    pipe.close()
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines.count('{"event": "window_closed", "window": 7}') == 1


def test_a_companion_that_died_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pipe = start("import sys; sys.exit(3)")
    process = pipe._process
    assert eventually(lambda: process.poll() is not None)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            pipe.send({"event": "step"})
    assert len(caplog.records) == 1 and not pipe.is_alive


def test_a_program_that_is_not_there_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        pipe = CompanionPipe()
        pipe.start(("/no/such/program",), {}, {})
    pipe.send({"event": "step"})
    pipe.close()
    assert len(caplog.records) == 1 and "/no/such/program" in caplog.text


def test_patience_at_the_end_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    pipe = start(DEAF)
    process = pipe._process
    with caplog.at_level(logging.WARNING):
        pipe.close(timeout_s=0.05)
    assert "finishes on its own" in caplog.text
    process.kill()
    process.wait()


def test_a_companion_that_is_stopped_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    pipe = start("import sys; sys.stdin.read()")
    process = pipe._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    begin_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        pipe.close(timeout_s=15.0)
    assert time.monotonic() - begin_s < 5.0
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"kill -CONT {process.pid} lets it finish" in message
    process.send_signal(signal.SIGCONT)
    assert process.wait(20) == 0


def test_a_companion_that_was_stopped_for_a_moment_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As by Ctrl-Z, and fg afterwards."""
    pipe = start("import sys, time; sys.stdin.read(); time.sleep(1.5)")
    process = pipe._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    going_on = threading.Timer(LOOK_S / 2, process.send_signal, (signal.SIGCONT,))
    going_on.start()
    with caplog.at_level(logging.WARNING):
        pipe.close(timeout_s=15.0)
    assert process.returncode == 0 and not caplog.records
