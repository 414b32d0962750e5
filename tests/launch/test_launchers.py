"""Who takes the flags: a worker and what it becomes, never a launcher, whatever is exported.

Whether a process is a launcher or a worker depends on how the real launchers start theirs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
RANKED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
FLAGS = ("--calibrate", "--calibrate-steps=8")
TRAIN = """
import json, os, sys
given = sys.argv[1:]
import torch
from forerun.hooks.session.session import running
session = running()
steps = session.settings.steps if session else None
print(json.dumps({"given": given, "left": sys.argv[1:], "steps": steps}), flush=True)
"""
DEEPSPEED_RUNNER = """
import subprocess, sys
import torch
command = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", "--world_info=e30="]
sys.exit(subprocess.run([*command, *sys.argv[1:]]).returncode)
"""
DEEPSPEED_LAUNCH = """
import os, subprocess, sys
import torch
script, *rest = sys.argv[2:]
environ = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
command = [sys.executable, "-u", script, "--local_rank=0", *rest]
sys.exit(subprocess.Popen(command, env=environ).wait())
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def start(*command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("FORERUN", "TORCHELASTIC", "TORCH_DEVICE")) and key not in RANKED
    }
    done = subprocess.run(
        [str(word) for word in command],
        env={**inherited, "OMP_NUM_THREADS": "1", **environ},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def seen(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def taken(done: subprocess.CompletedProcess[str]) -> int:
    return done.stdout.count("[forerun] taken from the arguments: --calibrate --calibrate-steps=8 ")


def command_path(name: str) -> str:
    """A command of this environment."""
    return str(Path(sys.executable).parent / name)


def deepspeed(folder: Path) -> list[str | Path]:
    """The processes of DeepSpeed's launcher, under its names: its packages are not installed."""
    package = folder / "deepspeed"
    (package / "launcher").mkdir(parents=True)
    (package / "__init__.py").write_text("import torch\n")
    (package / "launcher" / "__init__.py").write_text("")
    (package / "launcher" / "launch.py").write_text(DEEPSPEED_LAUNCH)
    (folder / "bin").mkdir()
    (folder / "bin" / "deepspeed").write_text(DEEPSPEED_RUNNER)
    return [sys.executable, folder / "bin" / "deepspeed"]


@pytest.mark.parametrize("launcher", ["torchrun", "module", "accelerate", "deepspeed"])
def test_a_launcher_hands_the_flags_on_with_every_variable_exported(
    tmp_path: Path, train: Path, launcher: str
) -> None:
    elastic = ("--standalone", "--nproc-per-node", "1")
    command: list[str | Path] = {
        "torchrun": lambda: [command_path("torchrun"), *elastic],
        "module": lambda: [sys.executable, "-m", "torch.distributed.run", *elastic],
        "accelerate": lambda: [
            command_path("accelerate"),
            "launch",
            "--cpu",
            "--num_processes",
            "1",
        ],
        "deepspeed": lambda: deepspeed(tmp_path),
    }[launcher]()
    done = start(*command, train, *FLAGS, "--lr", "1", **RANKED, PYTHONPATH=str(tmp_path))
    extra = ["--local_rank=0"] if launcher == "deepspeed" else []
    (worker,) = seen(done)
    assert worker["given"] == [*extra, *FLAGS, "--lr", "1"]
    assert worker["left"] == [*extra, "--lr", "1"]
    assert worker["steps"] == 8
    assert taken(done) == 1


def test_a_script_of_srun_is_no_worker_and_what_it_starts_is(tmp_path: Path, train: Path) -> None:
    task = tmp_path / "task.sh"
    task.write_text(
        "#!/bin/bash\n"
        "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS\n"
        f"{sys.executable} -c 'import torch'\n"
        f'exec {sys.executable} "$@"\n'
    )
    slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
    done = start("bash", task, train, *FLAGS, **slurm)
    (worker,) = seen(done)
    assert (worker["given"], worker["left"], worker["steps"]) == (list(FLAGS), [], 8)
    assert taken(done) == 1


@pytest.mark.parametrize("words", ["sys.argv[1:]", "sys.orig_argv[2:]"])
def test_a_worker_is_still_the_owner_after_exec(tmp_path: Path, train: Path, words: str) -> None:
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import os, sys, torch\n"
        f"os.execv(sys.executable, [sys.executable, {str(train)!r}, *{words}])\n"
    )
    done = start(sys.executable, wrapper, *FLAGS, "--lr", "1", **RANKED)
    (worker,) = seen(done)
    assert worker["left"][-2:] == ["--lr", "1"]  # type: ignore[index]
    assert not set(FLAGS) & set(worker["left"])  # type: ignore[arg-type]
    assert worker["steps"] == 8
    assert taken(done) == 1


def test_what_a_worker_starts_loses_the_same_flags_and_opens_no_session(
    tmp_path: Path, train: Path
) -> None:
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import subprocess, sys, torch\n"
        f"subprocess.run([sys.executable, {str(train)!r}, *sys.orig_argv[2:]], check=True)\n"
        f"subprocess.run([sys.executable, {str(train)!r}, '--calibrate-every=9'], check=True)\n"
    )
    done = start(sys.executable, wrapper, *FLAGS, "--lr", "1", **RANKED, FORERUN_CALIBRATE="1")
    same, other = seen(done)
    assert (same["left"][-2:], same["steps"]) == (["--lr", "1"], None)  # type: ignore[index]
    assert not set(FLAGS) & set(same["left"])  # type: ignore[arg-type]
    assert (other["left"], other["steps"]) == (["--calibrate-every=9"], None)
    assert done.stdout.count("[forerun]") == 1


def test_a_launch_inside_a_worker_has_workers_of_its_own(tmp_path: Path, train: Path) -> None:
    wrapper = tmp_path / "wrapper.py"
    launcher = [command_path("torchrun"), "--standalone", "--nproc-per-node", "1", str(train)]
    wrapper.write_text(
        "import subprocess, sys, torch\n"
        f"subprocess.run([*{launcher!r}, '--forerun-steps=9', '--lr', '2'], check=True)\n"
        f"subprocess.run([*{launcher!r}, '--lr', '3'], check=True)\n"
    )
    done = start(sys.executable, wrapper, *FLAGS, **RANKED, TORCHELASTIC_RUN_ID="above")
    first, second = seen(done)
    assert (first["left"], first["steps"]) == (["--lr", "2"], 9)
    assert (second["left"], second["steps"]) == (["--lr", "3"], None)


def test_an_owner_that_is_gone_is_none(train: Path) -> None:
    assert shutil.which("true")
    ended = subprocess.Popen(["true"])
    ended.wait()
    stale = {"FORERUN_OWNER": f"{ended.pid}:1"}
    (worker,) = seen(start(sys.executable, train, *FLAGS, **RANKED, **stale))
    assert (worker["left"], worker["steps"]) == ([], 8)
