"""Files that users copy for a scheduler: they parse, ship, and have the program's figures."""

from __future__ import annotations

import configparser
import re
import shlex
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from forerun.launch.cli import build_parser
from forerun.launch.options.flags import parse, split
from forerun.launch.verbs.run import STOP_EXIT_CODE, wrap_options
from forerun.launch.wrapper.resubmit import relaunch, script, try_write_script

ROOT = Path(__file__).parent.parent.parent
SBATCH = ROOT / "recipes" / "slurm.sbatch"
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "recipes" / "kubernetes.yaml").read_text(encoding="utf-8"))


def launch_of(text: str) -> list[str]:
    """The words of the one command that a script becomes."""
    (line,) = [x for x in text.replace("\\\n", " ").splitlines() if x.startswith("exec ")]
    return shlex.split(line)[1:]


def checked(words: list[str]) -> list[str]:
    """The training command of a wrapped launch whose options and flags are all known."""
    assert words[:2] == ["forerun", "run"]
    place = words.index("--")
    args = build_parser().parse_args(words[1:place])
    args.command = words[place + 1 :]
    parse(split(args.command).flags, TORCHRUN, (), ())
    assert wrap_options(args, {}, 0.0).listens
    assert not wrap_options(args, {"FORERUN_OFF": "1"}, 0.0).listens
    return args.command


def test_all_is_shipped() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    shipped = setup["options.package_data"]["forerun.recipes"].split(", ")
    for path in (ROOT / "recipes").iterdir():
        if path.is_file() and path.suffix != ".py":
            assert any(fnmatch(path.name, pattern) for pattern in shipped), path.name


def test_the_slurm_script_is_bash_and_runs_what_there_is() -> None:
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    command = checked(launch_of(SBATCH.read_text(encoding="utf-8")))
    assert command[0] == "srun" and split(command).present


def check_job(job: dict[str, Any], trainer: dict[str, Any]) -> list[str]:
    """The training command of a Job that gives up at our exit code alone, and waits for grace."""
    rule, *others = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [STOP_EXIT_CODE]
    assert not [other for other in others if other["action"] == "FailJob"]
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # a failure policy is refused with any other
    (container,) = pod["containers"]
    assert container["name"] == rule["onExitCodes"]["containerName"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    words = [*trainer["command"], *trainer["args"]]
    args = build_parser().parse_args(words[1 : words.index("--")])
    assert args.grace < pod["terminationGracePeriodSeconds"]
    return checked(words)


def test_the_kubernetes_job_gives_up_at_our_exit_code_only(job: dict[str, Any]) -> None:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    check_job(job, container)


def test_a_train_job_is_one_launch_on_a_runtime_that_gives_up_at_our_exit_code() -> None:
    """Names are those of Kubeflow Trainer's ``pkg/constants`` (v2.3.0)."""
    text = (ROOT / "recipes" / "trainjob.yaml").read_text(encoding="utf-8")
    runtime, job = yaml.safe_load_all(text)
    assert {one["apiVersion"] for one in (runtime, job)} == {"trainer.kubeflow.org/v1alpha1"}
    wanted = {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    assert job["spec"]["runtimeRef"] == wanted
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = node["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert node["name"] == container["name"] == "node"
    trainer = job["spec"]["trainer"]
    command = check_job(node["template"], trainer)
    # Trainer tells torchrun by its variables; an option would win over them.
    assert command[:2] == ["torchrun", "pretrain_gpt.py"]
    # A variable is known to those after it, and to the arguments.
    first, second = trainer["env"]
    assert first["name"] == "JOB_NAME" and "valueFrom" in first
    assert second == {"name": "FORERUN_LAUNCH_ID", "value": "$(JOB_NAME)"}
    assert "name" not in job["metadata"] and job["metadata"]["generateName"]
    (directory_flag,) = [word for word in command if word.startswith("--calibrate-dir=")]
    assert directory_flag.endswith("/$(JOB_NAME)")


def test_each_job_has_a_folder_of_its_own_and_a_chain_that_of_its_first(
    job: dict[str, Any],
) -> None:
    (line,) = re.findall(r"^out=.*", SBATCH.read_text(encoding="utf-8"), re.MULTILINE)
    for environ, folder in (
        ({"SLURM_JOB_ID": "12"}, "/home/forerun-out/12"),
        ({"SLURM_JOB_ID": "13", "FORERUN_CHAIN": "12"}, "/home/forerun-out/12"),
    ):
        done = subprocess.run(
            ["bash", "-euc", f'{line}\necho "$out"'],
            env={"SLURM_SUBMIT_DIR": "/home", **environ},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == folder
    assert "name" not in job["metadata"] and job["metadata"]["generateName"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (directory_flag,) = [word for word in container["args"] if word.startswith("--calibrate-dir=")]
    assert directory_flag.endswith("/$(JOB_NAME)") and container["env"][0]["name"] == "JOB_NAME"


def test_the_written_script_is_for_the_next_job_and_not_for_this_one(tmp_path: Path) -> None:
    ran = launch_of(SBATCH.read_text(encoding="utf-8"))
    given = {"$SLURM_JOB_ID": "4711", "$SLURM_JOB_NUM_NODES": "2", "$SLURMD_NODENAME": "node7"}
    for name, value in {**given, "$out": "/data/out/4700"}.items():
        ran = [word.replace(name, value) for word in ran]
    place = ran.index("--")
    relaunched_words = relaunch(
        ran[place + 1 :], ["pretrain_gpt.py", "--tensor-model-parallel-size", "4"]
    )
    path = tmp_path / "resubmit.sh"
    environ = {"SLURM_JOB_ID": "4711", "SLURMD_NODENAME": "node7", "SLURM_JOB_NUM_NODES": "2"}
    words = [*ran[: place + 1], *relaunched_words]
    reason = "faster\nelsewhere $(reboot)"
    assert try_write_script(script(words, reason, "1-02:00:00", environ), path)
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    assert "#SBATCH --time=1-02:00:00" in text and "#SBATCH --nodes=2" in text
    assert "4711" not in text and "node7" not in text
    assert "\n# Written by forerun: faster elsewhere $(reboot)\n" in text
    words = launch_of(text)
    assert words[words.index("--rdzv-endpoint") + 1] == "$SLURMD_NODENAME:29500"
    assert words[words.index("pretrain_gpt.py") + 1 :][:2] == ["--tensor-model-parallel-size", "4"]
    checked(words)
