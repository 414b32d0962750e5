"""A wrapper that cannot be heard, or finds absurd files, or fails itself: training goes on.

Each command here works for some seconds, says in a file that it came to its end, and exits with 7.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from wrapped_launch import PATIENCE_S, wait_until

from forerun.launch.batch_text import one_line
from forerun.launch.store.launch_files import LaunchFiles
from forerun.launch.wrapper.log_lines import LogWriter

RUN = (sys.executable, "-m", "forerun.launch.cli", "run")
END = "pathlib.Path('ended').touch(); sys.exit(7)"


def working(seconds: float, first: str = "") -> tuple[str, ...]:
    code = f"import os, pathlib, sys, time\n{first}\ntime.sleep({seconds}); {END}"
    return (sys.executable, "-S", "-c", code)


def readerless_pipe() -> int:
    """The writing end of a pipe whose reader is gone, as of a ``tee`` that died."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def full_pipe() -> int:
    """The writing end of a full pipe that somebody holds and nobody reads."""
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    flags = fcntl.fcntl(writing, fcntl.F_GETFL)
    fcntl.fcntl(writing, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        fcntl.fcntl(writing, fcntl.F_SETFL, flags)
    return writing


def full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.slow
def test_training_does_not_care_whether_the_wrapper_is_heard(tmp_path: Path) -> None:
    # It speaks before the start (the limit), meanwhile (near the limit), and at the end (JSON).
    options = ("--time-limit=3s", "--margin=1h", "--json")
    begun: dict[str, subprocess.Popen[bytes]] = {}
    for number in (1, 2):
        for opened in (readerless_pipe, full_pipe, full, None):
            home = tmp_path / f"{number} {opened and opened.__name__}"
            home.mkdir()
            handles = {1: subprocess.DEVNULL, 2: subprocess.DEVNULL}
            handles[number] = opened() if opened else subprocess.DEVNULL
            begun[home.name] = subprocess.Popen(
                [*RUN, *options, "--", *working(2.5)],
                cwd=home,
                stdout=handles[1],
                stderr=handles[2],
                preexec_fn=None if opened else lambda number=number: os.close(number),
            )
            if opened:
                os.close(handles[number])
    codes = {name: process.wait(timeout=PATIENCE_S) for name, process in begun.items()}
    assert set(codes.values()) == {7}, codes
    assert all((tmp_path / name / "ended").exists() for name in begun)


def test_a_voice_says_what_can_be_said_and_drops_the_rest() -> None:
    reading, writing = os.pipe()
    writer = LogWriter(writing)
    writer.write_line("first")
    assert os.read(reading, 100) == b"first\n"
    begin = time.monotonic()
    for _ in range(1000):
        writer.write_line("x" * 4000)  # more than a pipe holds
    assert time.monotonic() - begin < 20.0
    os.close(reading)  # the writer's thread ends with an error that it keeps
    writer.finish(PATIENCE_S)
    writer.write_line("nobody")
    os.close(writing)
    assert one_line("a\nb\x1b[2J\r c") == "a b [2J c"


def plant(path: Path, kind: str) -> None:
    """An absurd thing where a file of JSON should be."""
    path.unlink(missing_ok=True)
    texts = {
        "digits": '{"now_unix_s": 1, "steps_done": 1, "steps_left": %s}' % ("9" * 400),
        "1e400": '{"now_unix_s": 1e400, "steps_done": -1e400, "steps_left": 1e400}',
        "NaN": '{"now_unix_s": NaN, "steps_done": NaN, "steps_left": NaN}',
        "brackets": "[" * 200_000,
        "objects": '{"a":' * 200_000,
        "list": "[1, 2]",
        "words": '{"steps_left": "9", "steps_done": [], "remaining_s": {}, "save_times_s": 3}',
    }
    if kind in texts:
        path.write_text(texts[kind].replace("{", '{"launch_id": "own", ', 1))
    elif kind == "bytes":
        path.write_bytes(b'{"launch_id": "own", "steps_left": "\xff\xfe\x80"}')
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(3 * 2**30)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to(path.parent / "nowhere")
    else:
        path.symlink_to(path.name)


KINDS = ("digits", "1e400", "NaN", "brackets", "objects", "list", "words", "bytes", "huge")
NODES = ("fifo", "folder", "dangling", "loop")


@pytest.mark.parametrize("kind", [*KINDS, *NODES])
def test_absurd_files_are_as_if_they_were_not_there(tmp_path: Path, kind: str) -> None:
    files = LaunchFiles(tmp_path, "own")
    files.folder.mkdir(parents=True)
    for name in ("forecast.json", "request.json", "decision.json", "launch.json"):
        plant(files.folder / name, kind)
    files.follow()
    assert (files.launch_id, files.forecast(), files.advised_command()) == ("own", None, ())
    plant(files.folder / "stop.json", kind)
    stop = files.stop()
    assert stop is None or (stop.iteration, stop.unix_s, stop.command) == (None, 0.0, ())
    if kind != "folder":
        plant(files.folder / "stop-request.json", kind)
        files.ask("the limit is near")
        assert json.loads((files.folder / "stop-request.json").read_text())["launch_id"] == "own"


def test_numbers_that_no_run_has_make_no_forecast_that_cannot_be_said(tmp_path: Path) -> None:
    files = LaunchFiles(tmp_path, "own")
    files.folder.mkdir(parents=True)
    result = {"launch_id": "own", "steps_done": 1, "steps_left": 1, "remaining_s": -5.0}
    (files.folder / "forecast.json").write_text(json.dumps({**result, "remaining_high_s": 1e308}))
    saves = {"launch_id": "own", "save_times_s": [-3.0, None, "x", float("inf"), 2.0]}
    (files.folder / "request.json").write_text(json.dumps(saves).replace("inf", "1e999"))
    assert (files.forecast(), files.longest_save_s()) == (None, 2.0)


PLANTING = """
launch = os.environ.get("FORERUN_LAUNCH_ID", "none")
for home in (pathlib.Path("out"), pathlib.Path("out/runs") / launch):
    home.mkdir(parents=True, exist_ok=True)
    number = "9" * 400
    text = '{"launch_id": "%s", "now_unix_s": 9e9, "steps_done": 1, "steps_left": %s}'
    (home / "forecast.json").write_text(text % (launch, number))
    (home / "decision.json").write_text("[" * 200_000)
    os.mkfifo(home / "stop.json")
    os.symlink("launch.json", home / "launch.json")
"""


@pytest.mark.slow
def test_a_launch_survives_what_was_planted_in_its_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [*RUN, "--directory=out", "--time-limit=1h", "--", *working(3.5, PLANTING)],
        cwd=tmp_path,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, (tmp_path / "ended").exists()) == (7, True)
    assert b"Traceback" not in done.stderr


BROKEN = """
import sys, time
from forerun.launch.wrapper import {module}
from forerun.launch.cli import main
real, count = {module}.{name}, []
def broken(*given, **named):
    count.append(1)
    if len(count) == 2:
        {fault}
    return real(*given, **named)
{module}.{name} = broken
sys.exit(main(["run", "--directory=out", "--time-limit=1h", "--grace=20s", "--", *sys.argv[1:]]))
"""
FAULTS = {
    "the loop": ("_children", "SignalInbox.wait", "raise MemoryError"),
    "reaping": ("_children", "ProcessTree.reap", "raise RecursionError('deep')"),
    "an exit": ("_children", "SignalInbox.wait", "raise SystemExit(0)"),
    "an interrupt": ("_children", "ProcessTree.reap", "raise KeyboardInterrupt"),
    "a look": ("wrapped", "FileWatch._look_at_limit", "raise OverflowError"),
    "a look that hangs": ("wrapped", "FileWatch._look_at_limit", "time.sleep(1000)"),
}


def begin_broken(home: Path, fault: str, *command: str) -> subprocess.Popen[str]:
    home.mkdir()
    module, name, text = FAULTS[fault]
    code = BROKEN.format(module=module, name=name, fault=text)
    return subprocess.Popen(
        [sys.executable, "-c", code, *command], cwd=home, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_fault_of_the_wrapper_ends_no_training(tmp_path: Path) -> None:
    begun = {name: begin_broken(tmp_path / name, name, *working(3.0)) for name in FAULTS}
    for name, process in begun.items():
        _, output = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, (tmp_path / name / "ended").exists()) == (7, True), output
        assert ("training goes on" in output) is ("hangs" not in name), output


@pytest.mark.slow
def test_a_signal_reaches_training_after_a_fault_of_the_wrapper(tmp_path: Path) -> None:
    command = (sys.executable, "-S", "-c", SAVING)
    begun = {name: begin_broken(tmp_path / name, name, *command) for name in FAULTS}
    wait_until(lambda: all((tmp_path / name / "up").exists() for name in begun))
    time.sleep(2.5)
    for process in begun.values():
        process.send_signal(signal.SIGTERM)
    for name, process in begun.items():
        _, output = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, (tmp_path / name / "saved").exists()) == (3, True), output


SAVING = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path("saved").touch()
    sys.exit(3)
signal.signal(signal.SIGTERM, save)
pathlib.Path("up").touch()
time.sleep(60)
"""
