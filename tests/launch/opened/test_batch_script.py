"""A script for sbatch: its time covers the run, and a shell starts what the line says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from forerun.launch.cli import ExitCode, main
from forerun.launch.opened.run import unmeasured
from forerun.launch.wrapper.slurm import duration_s

_LINE = (
    "torchrun --nproc-per-node 8 --nnodes 2 --master-addr n0 --node-rank 0 pretrain_gpt.py --bf16 "
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 --vocab-size 50304 "
    "--use-distributed-optimizer"
)
LINE = _LINE.split()
_SRUN = """#!/bin/sh
printf '%s\\n' "$CUDA_DEVICE_MAX_CONNECTIONS" "$@" > ran
"""
Out = pytest.CaptureFixture[str]


def write(path: Path, *words: str, line: list[str] = LINE) -> int:
    return main(["predict", "--device", "H100", "--sbatch", str(path), *words, "--", *line])


def options(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("tokens", ["1M", "20B", "1T"])
def test_its_time_covers_the_upper_end_and_the_start(tokens: str, tmp_path: Path) -> None:
    path = tmp_path / "go.sbatch"
    assert write(path, "--tokens", tokens, "--gpus", "32") == ExitCode.ANSWER
    run = unmeasured("H100", command=LINE).predict(gpus=32, tokens=tokens).whole_run
    script_options = options(path.read_text(encoding="utf-8"))
    assert run is not None
    slack_s = duration_s(script_options["time"]) - run.high_s
    assert 1800 <= slack_s < 1800 + 900
    assert (
        script_options["nodes"],
        script_options["gpus-per-node"],
        script_options["job-name"],
    ) == ("4", "8", "pretrain_gpt")


@pytest.mark.parametrize(("device", "num_ranks"), [("GB200", 16), ("GB200", 32), ("H100", 16)])
def test_hosts_of_a_domain_are_started_one_by_one(
    device: str, num_ranks: int, tmp_path: Path, capsys: Out
) -> None:
    """A rack of GB200 is one node of a layout, and 18 hosts of a job."""
    path, gpus = tmp_path / "go.sbatch", str(num_ranks)
    line = [*LINE[:2], "4", "--nnodes", "8", *LINE[9:]]
    cluster_options = ["--device", device, "--gpus", gpus]
    words = ["--tokens", "20B", "--sbatch", str(path)]
    assert main(["predict", *cluster_options, *words, "--", *line]) == ExitCode.ANSWER
    text = path.read_text(encoding="utf-8")
    script_options = options(text)
    assert (script_options["nodes"], script_options["gpus-per-node"]) == (str(num_ranks // 4), "4")
    assert "--nproc-per-node 4 " in text
    capsys.readouterr()
    assert main(["plan", *cluster_options, "--show", "1", "--", *line]) == ExitCode.ANSWER
    shown = capsys.readouterr().out.partition("# changed")[0]
    assert "--nproc-per-node 4 " in shown and f"--nnodes {num_ranks // 4} " in shown


def test_a_shell_starts_the_line_on_the_nodes_of_the_job(tmp_path: Path) -> None:
    path, srun = tmp_path / "go.sbatch", tmp_path / "srun"
    srun.write_text(_SRUN)
    srun.chmod(0o700)
    assert write(path, "--tokens", "20B", "--tp", "2") == ExitCode.ANSWER
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n5"}
    slurm["SLURM_CPUS_PER_TASK"] = options(path.read_text())["cpus-per-task"].split()[0]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", **slurm}
    subprocess.run(["bash", str(path)], cwd=tmp_path, env=env, check=True)
    connections, *words = (tmp_path / "ran").read_text().splitlines()
    assert connections == "1"
    command_line = " ".join(words)
    start = "--cpus-per-task=64 --kill-on-bad-exit=1 torchrun --nnodes 2 --rdzv-id 7"
    assert command_line.startswith(start)
    assert "--rdzv-endpoint n5:29500 --nproc-per-node 8 pretrain_gpt.py --bf16" in command_line
    assert "--master-addr" not in command_line and "--node-rank" not in command_line
    assert "--tensor-model-parallel-size 2" in command_line
    assert command_line.endswith(f"--train-iters {-(-20 * 10**9 // (64 * 2048))}")


def test_a_line_has_its_own_length(tmp_path: Path) -> None:
    path = tmp_path / "go.sbatch"
    assert write(path, line=[*LINE, "--train-iters", "500"]) == ExitCode.ANSWER
    text = path.read_text(encoding="utf-8")
    assert text.count("--train-iters") == 1 and "# 65.54M tokens: " in text


def test_no_other_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "go.sbatch"
    path.write_text("mine")
    prediction = unmeasured("H100", command=LINE).predict(tokens="1B")
    with pytest.raises(FileExistsError, match="not written by forerun"):
        prediction.write_sbatch(path)
    assert path.read_text() == "mine"
