"""The scheduler's limit: told in whole seconds, and held while the clock of the node is set."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from wrapped_launch import PATIENCE_S

from forerun.calib.forecast.forecast_record import Forecast
from forerun.launch.batch_text import time_option
from forerun.launch.store.launch_files import LaunchFiles
from forerun.launch.wrapper.slurm import duration_s, from_scontrol, from_squeue

RUN = (sys.executable, "-m", "forerun.launch.cli", "run")
SQUEUE = """#!/bin/sh
# As Slurm: whole seconds, by the controller's clock.
now=$(date +%s)
[ -e end ] || echo $((now + 8)) > end
echo "0:0$(($(cat end) - now))"
"""


@pytest.mark.slow
def test_a_limit_that_only_squeue_tells_is_kept(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("squeue", SQUEUE), ("scontrol", "#!/bin/sh\nexit 1\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    done = subprocess.run(
        [*RUN, "--save-before-limit", "--margin=1h", "--", "sleep", "20"],
        cwd=tmp_path,
        env={**inherited, "SLURM_JOB_ID": "7", "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "(squeue)" in done.stderr
    match = re.search(r"(\d+) s before the limit", done.stderr)
    assert done.returncode == 143 and match is not None and int(match[1]) > 0, done.stderr


SET_CLOCK = """
import sys, time
real, begin, shift = time.time, time.monotonic(), float(sys.argv.pop(1))
time.time = lambda: real() + (shift if time.monotonic() > begin + 1.5 else 0.0)
from forerun.launch.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_clock_that_is_set_moves_no_limit(tmp_path: Path) -> None:
    begun = {}
    for shift, limit, seconds in (("3600", 60, 4), ("-3600", 6, 20), ("3600", 6, 20)):
        options = ("--save-before-limit", "--margin=2s", f"--time-limit={limit}s")
        command = ("bash", "-c", f"sleep {seconds}; exit 7")
        begun[shift, limit] = subprocess.Popen(
            [sys.executable, "-c", SET_CLOCK, shift, "run", *options, "--", *command], cwd=tmp_path
        )
    codes = {case: process.wait(timeout=PATIENCE_S) for case, process in begun.items()}
    assert codes == {("3600", 60): 7, ("-3600", 6): 143, ("3600", 6): 143}


def test_what_is_left_goes_by_the_time_that_passed_and_not_by_the_clock() -> None:
    forecast = Forecast(
        now_unix_s=time.time() + 3600.0,
        steps_done=25,
        steps_left=75,
        remaining_s=80.0,
        remaining_high_s=100.0,
    )
    left_s = forecast.remaining_after_s(40.0), forecast.remaining_after_s(200.0)
    assert (*left_s, forecast.done_frac_after(40.0)) == (60, 0, 0.625)


def test_a_request_is_younger_than_its_session_though_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, real = LaunchFiles(tmp_path, "own"), time.time
    session_unix_s = real()
    monkeypatch.setattr(time, "time", lambda: real() - 3600.0)
    files.ask("the limit is near")
    value = json.loads((files.folder / "stop-request.json").read_text())
    assert value["unix_s"] >= session_unix_s - 1e-3


def test_slurm_says_what_is_left_by_its_own_clock() -> None:
    golden = Path(__file__).parents[2] / "golden" / "slurm"
    text = (golden / "limit.txt").read_text().replace("RunTime=00:00:00", "RunTime=02:00:00")
    allocation = from_scontrol(text, "1")
    assert allocation is not None and allocation.remaining_s == 24 * 3600.0
    endless = from_scontrol((golden / "unlimited.txt").read_text(), "2")
    assert endless is not None and endless.remaining_s is None
    limit = from_squeue("1:30\n", "7", 0.0)
    assert limit is not None and limit.remaining_s == 90.0


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "-00", "1:" + "9" * 5000])
def test_times_of_absurd_length_are_none(text: str) -> None:
    assert duration_s(text) != duration_s(text)
    assert from_squeue(text, "7", 0.0) is None
    assert len(time_option(1e15)) < 30
