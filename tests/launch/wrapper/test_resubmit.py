"""The script that starts an advised layout: whose file it is, and that words stay words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from wrapped_launch import Launch

from forerun.calib.records.files import is_ours
from forerun.calib.shell import quoted
from forerun.launch.batch_text import MARK
from forerun.launch.wrapper.resubmit import script, try_write_script

STOPPING = """
import json, os, pathlib, sys
launch = os.environ["FORERUN_LAUNCH_ID"]
home = pathlib.Path("out/runs") / launch; home.mkdir(parents=True, exist_ok=True)
value = {"launch_id": launch, "iteration": 30, "reason": "it pays\\nreboot", "rule": "restart",
         "command": ["train.py", "--tensor-model-parallel-size", "2", *sys.argv[2:]]}
(home / "stop.json").write_text(json.dumps(value))
"""
HAND = "#!/bin/bash\n# my own, of 300 lines\nexec torchrun train.py\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "launch.py").write_text(STOPPING)
    (tmp_path / "train.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    return tmp_path


def stopped(home: Path, *options: str, words: tuple[str, ...] = ()) -> tuple[Launch, str | None]:
    """An advised stop; the launch, and where its script is."""
    command = (sys.executable, "launch.py", "train.py", *words, "--calibrate-dir=out")
    launch = Launch(home, *command, options=options)
    code, summary = launch.end()
    assert code == 93, launch.err
    path = summary["resubmit"]
    assert path is None or isinstance(path, str)
    return launch, path


def test_a_script_that_a_user_wrote_stays_and_ours_lies_in_the_folder_of_the_launch(
    home: Path,
) -> None:
    hand = home / "out" / "resubmit.sh"
    hand.parent.mkdir()
    hand.write_text(HAND)
    launch, path = stopped(home)
    assert hand.read_text() == HAND and "was not written by" in launch.err
    assert path is not None and is_ours(home / path)
    assert (home / path).parent.parent == home / "out" / "runs"


def test_only_an_unchanged_script_of_ours_is_replaced(home: Path) -> None:
    _, path = stopped(home)
    assert path == "out/resubmit.sh" and (home / path).stat().st_mode & 0o777 == 0o700
    first = (home / path).read_text()
    _, second_path = stopped(home, words=("--lr", "1"))
    assert second_path == path and "--lr 1" in (home / path).read_text() != first
    edited = first.replace("set -eu", "set -eux")
    (home / path).write_text(edited)
    stopped(home)
    assert (home / path).read_text() == edited


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_what_is_no_file_is_not_replaced_either(home: Path, kind: str) -> None:
    place = home / "mine"
    (home / "target").write_text(MARK)
    if kind == "link":
        place.symlink_to("target")
    else:
        place.mkdir()
    _, path = stopped(home, "--resubmit-script=mine")
    assert path is not None and path.startswith("out/runs/")
    assert (home / "target").read_text() == MARK and place.is_symlink() is (kind == "link")


def test_a_script_goes_where_it_is_wanted(home: Path) -> None:
    _, path = stopped(home, "--resubmit-script=scripts/next.sh")
    assert path == "scripts/next.sh" and is_ours(home / path)
    assert not (home / "out" / "resubmit.sh").exists()


WORDS = (
    "train.py",
    "a b",
    "it's",
    '"',
    "\\",
    "$(reboot)",
    "`x`",
    "line\nbreak\x1b",
    "é",
    "\udcfe\n",
)


def test_every_word_arrives_as_it_was(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (sys.executable, "-m", "forerun.launch.cli", "run", "--", sys.executable, *WORDS)
    path = home / "resubmit.sh"
    monkeypatch.chdir(home)
    assert try_write_script(script(words, "\nreboot\r\n", "", {}), path)
    done = subprocess.run([path], capture_output=True, check=True)
    assert tuple(json.loads(done.stdout)) == WORDS[1:]
    assert all("\n" not in quoted(word) for word in WORDS)


NAMES = ("pretrain\nreboot", "a b", 'say "x"\\', "x\r#SBATCH --nodes=99", "new\u2028line")


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_job_is_one_value_of_one_line(name: str) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": name, "SLURMD_NODENAME": "n\nreboot"}
    lines = script(("env", "--", "true"), "x", "", environ).splitlines()
    assert [line for line in lines if line.startswith("#SBATCH --job-name=")] == [lines[1]]
    assert sum(line.startswith("#SBATCH") for line in lines) == 2
    assert not any(line.startswith(("reboot", "#SBATCH --nodes")) for line in lines)
    value = lines[1].removeprefix("#SBATCH --job-name=")
    # Inside double quotes Slurm reads as a shell would, but for $ and `.
    assert value[0] == value[-1] == '"'
    job_name = value[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    assert job_name == " ".join("".join(c if c.isprintable() else " " for c in name).split())


def test_variables_of_libraries_are_those_of_the_run(tmp_path: Path) -> None:
    """Another shell has other ones, and Megatron-LM refuses to start without some."""
    environ = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_IB_HCA": "a b",
        "HOME": "/x",
        "API_KEY": "s",
    }
    path = tmp_path / "go.sh"
    path.write_text(script(["env"], "it pays", "", environ))
    done = subprocess.run(["bash", str(path)], env={"PATH": "/usr/bin:/bin"}, stdout=-1, text=True)
    started = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert (started["CUDA_DEVICE_MAX_CONNECTIONS"], started["NCCL_IB_HCA"]) == ("1", "a b")
    assert not {"HOME", "API_KEY"} & started.keys()
    job = script(["env"], "it pays", "", {**environ, "SLURM_JOB_ID": "7"})
    assert "NCCL_IB_HCA" not in job
