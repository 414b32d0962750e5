"""A stop on advice in a real launch: one iteration, a checkpoint, no restart, and a way on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes" / "pretrain_gpt.py"
SMALL = (
    "--num-layers", "2", "--hidden-size", "32", "--seq-length", "32", "--micro-batch-size", "2",
    "--global-batch-size", "8", "--lr-decay-iters", "10", "--log-interval", "1",
)  # fmt: skip
PAST = "--calibrate-deadline=1000"


def launch(directory: Path, *command: str) -> str:
    ours = ("RANK", "WORLD_SIZE", "FORERUN_CALIBRATE")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, "--max-restarts=2", *command],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**environment, "OMP_NUM_THREADS": "1", "FORERUN_DEVICE": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: str) -> dict[int, float]:
    rows = re.findall(r"iteration +(\d+)/.* lm loss: (\S+)", output)
    return {int(step): float(loss) for step, loss in rows}


def test_a_stopped_run_has_saved_on_all_ranks_and_goes_on_in_the_advised_layout(
    tmp_path: Path,
) -> None:
    output = launch(
        tmp_path, str(RECIPE), *SMALL, "--train-iters", "100000", "--save", "saved",
        "--calibrate-steps=12", "--calibrate-on-advice=stop", PAST, "--calibrate-dir=out",
        "--calibrate-wandb=off",
    )  # fmt: skip
    marker = json.loads((tmp_path / "out" / "stop.json").read_text(encoding="utf-8"))
    decision = json.loads((tmp_path / "out" / "decision.json").read_text(encoding="utf-8"))
    last = marker["iteration"]
    before = losses(output)
    assert list(before) == list(range(1, last + 1)), "begun once, ended at the agreed iteration"
    assert "window reopens" in output
    assert (decision["action"], marker["rule"]) == ("stop", "deadline")
    assert decision["run_id"] == marker["run_id"] and decision["command"] == marker["command"]

    (folder,) = (tmp_path / "saved").glob("iter_*")
    states = [torch.load(path, weights_only=True) for path in sorted(folder.iterdir())]
    assert [state["iteration"] for state in states] == [last, last]

    command = marker["command"]
    assert command[command.index("--load") + 1] == "saved"
    resumed = launch(tmp_path, *command, "--exit-interval", str(last + 2))
    after = losses(resumed)
    assert list(after) == [last + 1, last + 2]
    level = fmean(loss for step, loss in before.items() if step > last - 20)
    assert abs(fmean(after.values()) - level) < 0.3 * (before[1] - level)
