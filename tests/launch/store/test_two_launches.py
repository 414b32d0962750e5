"""Several launches and one directory: each is told, stopped and believed by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from wrapped_launch import Launch, Torchrun, wait_until

from forerun.hooks.process.launch_identity import is_launch_id, safe_launch_id
from forerun.launch.store.launch_files import LaunchFiles, launch_id

FLAGS = ("--calibrate-dir=../out", "--calibrate-on-advice=stop")
STOP = {"iteration": 3, "reason": "go faster", "rule": "restart", "unix_s": 9e9, "command": ["x"]}


@pytest.mark.slow
def test_a_warning_to_one_wrapper_is_a_request_to_its_own_launch(tmp_path: Path) -> None:
    homes = [tmp_path / name for name in "ab"]
    options = ("--grace=3s", "--stop-patience=3s")
    first = second = None
    for home in homes:
        home.mkdir()
    first = Torchrun(homes[0], "saving", *FLAGS, options=options)
    first.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: [*tmp_path.glob("out/runs/*/stop-request.json")])
    second = Torchrun(homes[1], "saving", *FLAGS, options=options)
    (request,) = tmp_path.glob("out/runs/*/stop-request.json")
    assert not (tmp_path / "out" / "stop-request.json").exists(), "nothing at the top commands"
    second.process.send_signal(signal.SIGTERM)
    code, first_summary = first.end()
    assert (code, first_summary["launch_id"]) == (1, request.parent.name)
    other, second_summary = second.end()
    assert (other, second_summary["asked"], second_summary["signals"]) == (1, "", [signal.SIGTERM])
    assert second_summary["launch_id"] != first_summary["launch_id"]


PLANTED = f"""
import json, os, pathlib, sys
stop = {STOP!r}
out = pathlib.Path("out"); (out / "runs" / "another").mkdir(parents=True)
own = out / "runs" / os.environ.get("FORERUN_LAUNCH_ID", "none"); own.mkdir()
another = json.dumps({{**stop, "launch_id": "another"}})
for folder in (out, out / "runs" / "another", own):
    (folder / "stop.json").write_text(another)
    (folder / "decision.json").write_text(another)
(out / "stop.json").write_text(json.dumps(stop))
sys.exit(5)
"""


def test_a_stop_that_is_not_ours_leaves_a_crash_what_it_is(tmp_path: Path) -> None:
    command = (sys.executable, "-S", "-c", PLANTED)
    code, summary = Launch(tmp_path, *command, options=("--directory=out",)).end()
    assert (code, summary["stop"], summary["resubmit"]) == (5, None, None)


def test_an_id_that_is_used_again_does_not_bring_back_the_earlier_stop(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "same"
    folder.mkdir(parents=True)
    for name in ("stop.json", "stop-request.json", "forecast.json"):
        (folder / name).write_text(json.dumps({**STOP, "launch_id": "same", "steps_left": 9}))
    files = LaunchFiles(tmp_path, "same")
    assert files.stop() is not None
    files.begin()
    assert (files.stop(), files.forecast()) == (None, None)
    assert not (folder / "stop-request.json").exists()
    # The same text, written anew, is of this launch.
    (folder / "new").write_text((folder / "stop.json").read_text())
    os.replace(folder / "new", folder / "stop.json")
    assert files.stop() is not None


@pytest.mark.parametrize("agreed", ["rank0", "../../elsewhere", "", 7, None])
def test_the_wrapper_follows_the_id_that_the_ranks_agreed_on(
    tmp_path: Path, agreed: object
) -> None:
    files = LaunchFiles(tmp_path, "own")
    for name in ("own", "rank0"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "own" / "launch.json").write_text(json.dumps({"launch_id": agreed}))
    (tmp_path / "runs" / "rank0" / "stop.json").write_text(
        json.dumps(STOP | {"launch_id": "rank0"})
    )
    files.follow()
    assert files.launch_id == ("rank0" if agreed == "rank0" else "own")
    assert (files.stop() is not None) is (agreed == "rank0")
    files.ask("limit")
    assert (tmp_path / "runs" / files.launch_id / "stop-request.json").exists()


@pytest.mark.slow
def test_a_request_follows_the_ranks_and_is_written_again_where_it_is_lost(
    tmp_path: Path,
) -> None:
    launch = Torchrun(
        tmp_path, "saving", "--calibrate-dir=out", options=("--grace=3s", "--stop-patience=6s")
    )
    launch.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: [*tmp_path.glob("out/runs/*/stop-request.json")])
    (request,) = tmp_path.glob("out/runs/*/stop-request.json")
    request.unlink()
    wait_until(request.exists)
    (request.parent / "launch.json").write_text(json.dumps({"launch_id": "rank0"}))
    agreed = tmp_path / "out" / "runs" / "rank0" / "stop-request.json"
    wait_until(agreed.exists)
    assert json.loads(agreed.read_text())["launch_id"] == "rank0"
    assert launch.end()[0] == 1 and not agreed.exists()


JOB = {"SLURM_JOB_ID": "4711"}


def test_all_tasks_of_a_step_make_one_id_and_launches_of_a_shell_each_their_own() -> None:
    step = {**JOB, "SLURM_STEP_ID": "3", "SLURM_RESTART_COUNT": "2"}
    assert launch_id(step) == launch_id({**step, "SLURM_PROCID": "1"}) == "slurm-4711-2-3"
    results = {launch_id(environ) for environ in (JOB, JOB, {}, {}, {**JOB, "SLURM_STEP_ID": ""})}
    assert len(results) == 5 and all(map(is_launch_id, results))


def test_a_job_that_submits_the_next_one_does_not_give_it_its_own_id() -> None:
    given = launch_id(JOB)
    assert launch_id({**JOB, "FORERUN_LAUNCH_ID": given}) == given
    later = launch_id({"SLURM_JOB_ID": "4712", "FORERUN_LAUNCH_ID": given})
    assert later.startswith("slurm-4712-0-")
    assert launch_id({**JOB, "FORERUN_LAUNCH_ID": "nightly"}) == "nightly"


def test_the_command_is_told_the_id(tmp_path: Path) -> None:
    show = "echo $FORERUN_LAUNCH_ID > seen"
    code, summary = Launch(tmp_path, "bash", "-c", show).end()
    assert (tmp_path / "seen").read_text().strip() == summary["launch_id"] and code == 0
    environ = {**os.environ, "FORERUN_LAUNCH_ID": "a b"}
    command = [sys.executable, "-m", "forerun.launch.cli", "run", "--", "bash", "-c", show]
    subprocess.run(command, cwd=tmp_path, env=environ, check=True)
    assert (tmp_path / "seen").read_text().strip() == safe_launch_id("a b")


RECIPE = Path(__file__).parents[3] / "recipes" / "pretrain_gpt.py"
TINY = (
    *("--num-layers", "2", "--hidden-size", "32", "--seq-length", "32", "--micro-batch-size", "2"),
    *("--global-batch-size", "4", "--train-iters", "100000", "--save-interval", "100000"),
    *("--distributed-backend", "gloo", "--log-interval", "50"),
)


@pytest.mark.slow
def test_two_real_runs_in_one_directory_are_stopped_each_by_its_own_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.core")
    # Two runs with two threads each on two processors wait for one another for seconds.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    begun: dict[str, Launch] = {}
    for name in ("first", "second"):
        monkeypatch.setenv("FORERUN_LAUNCH_ID", name)
        begun[name] = Launch(
            tmp_path,
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"),
            *(str(RECIPE), *TINY, "--save", name, "--calibrate", "--calibrate-steps=4"),
            *("--calibrate-dir=out", "--calibrate-device=cpu", "--calibrate-wandb=off"),
            options=("--stop-patience=200s", "--grace=20s"),
        )
    folders = {name: tmp_path / "out" / "runs" / name for name in begun}
    try:
        for folder in folders.values():
            wait_until((folder / "launch.json").exists)
        begun["first"].process.send_signal(signal.SIGUSR1)
        ends = {"first": begun["first"].end()}
        assert begun["second"].process.poll() is None
        assert not (folders["second"] / "stop.json").exists()
        begun["second"].process.send_signal(signal.SIGUSR1)
        ends["second"] = begun["second"].end()
    finally:
        for launch in begun.values():
            launch.process.terminate()
    for name, (code, summary) in ends.items():
        stop = summary["stop"]
        assert isinstance(stop, dict), begun[name].err
        assert (code, summary["signals"], stop["rule"], summary["launch_id"]) == (
            0,
            [],
            "request",
            name,
        )
        saved = int((tmp_path / name / "latest_checkpointed_iteration.txt").read_text())
        assert saved == stop["iteration"]
        assert json.loads((folders[name] / "stop.json").read_text())["launch_id"] == name
