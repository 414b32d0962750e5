"""Megatron-LM's own script by the recipe for one node: its words, and a run where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.calib.arguments.megatron_command import config_from_command
from forerun.launch.options.flags import parse, split

ROOT = Path(__file__).parent.parent.parent
RECIPE = ROOT / "recipes" / "megatron_one_node.sh"
MEGATRON = os.environ.get("MEGATRON_LM", "")
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1"}
ITERS = 40


def launch(directory: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("FORERUN")}
    variables = {"RUN": str(directory / "run"), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    return subprocess.run(
        ["bash", str(RECIPE), *words],
        env={**inherited, **variables, **environ},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_megatron_it_says_how_to_name_it(tmp_path: Path) -> None:
    done = launch(tmp_path, MEGATRON_LM="")
    assert done.returncode != 0
    assert "say MEGATRON_LM=/path/to/Megatron-LM" in done.stderr


def test_its_words_are_those_of_megatron_and_ours_and_the_users_come_last(tmp_path: Path) -> None:
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/bash\nprintf \'%s\\n\' "$PWD" "$@"\n', encoding="utf-8")
    torchrun.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    clone = tmp_path / "clone"
    clone.mkdir()
    done = launch(tmp_path, "--lr", "1e-5", MEGATRON_LM=str(clone), GPUS="4", PATH=path)
    where, *words = done.stdout.splitlines()
    assert done.returncode == 0 and where == str(clone)
    assert words[:4] == ["--standalone", "--nproc-per-node", "4", "pretrain_gpt.py"]
    assert words[-2:] == ["--lr", "1e-5"]
    flag_split = split(words)
    parse(flag_split.flags, TORCHRUN, (), ())
    assert [word for word in flag_split.flags if word.startswith("--calibrate-dir=")] == [
        f"--calibrate-dir={tmp_path}/run/forerun-out"
    ]
    read = config_from_command(flag_split.rest[4:], num_ranks=4)
    par = read.config.parallelism
    assert (par.tp, par.pp, par.dp, par.is_optimizer_distributed) == (1, 1, 4, True)
    assert not read.unknown


@pytest.mark.slow
@pytest.mark.skipif(not MEGATRON, reason="MEGATRON_LM names no clone of Megatron-LM")
def test_unmodified_megatron_trains_and_is_answered(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = launch(tmp_path, "--train-iters", str(ITERS), CPU="1", PATH=path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"iteration       {ITERS}/" in done.stdout
    out = tmp_path / "run" / "forerun-out"
    forecast = json.loads((out / "latest" / "forecast.json").read_text(encoding="utf-8"))
    assert forecast["steps_done"] + forecast["steps_left"] == ITERS
    assert (out / "latest" / "decision.json").exists() and (out / "latest" / "report.html").exists()
