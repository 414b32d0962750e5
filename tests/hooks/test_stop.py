"""A stop on advice in a real launch: one iteration, a checkpoint, no restart, and a way on.

That no agent starts a stopped run again only a real agent shows.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from launched import torchrun
from written_files import check_written_files

pytest.importorskip("megatron")
pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes" / "pretrain_gpt.py"
# One layer has no pipeline: the recipe reads a checkpoint back by the degrees that wrote it, and so
# can follow advice on the micro-batch alone.
SMALL = (
    "--num-layers", "1", "--hidden-size", "32", "--seq-length", "32", "--micro-batch-size", "2",
    "--global-batch-size", "8", "--lr-decay-iters", "10", "--log-interval", "1",
)  # fmt: skip
RESTARTS = ("--max-restarts=2",)
PAST = "--calibrate-deadline=1000"


def losses(output: str) -> dict[int, float]:
    rows = re.findall(r"iteration +(\d+)/.* lm loss: (\S+)", output)
    return {int(step): float(loss) for step, loss in rows}


def test_a_stopped_run_has_saved_on_all_ranks_and_goes_on_in_the_advised_layout(
    tmp_path: Path,
) -> None:
    output = torchrun(
        tmp_path, str(RECIPE), *SMALL, "--train-iters", "100000", "--save", "saved",
        "--calibrate-steps=12", "--calibrate-on-advice=stop", PAST, "--calibrate-dir=out",
        # No second window comes by itself before the one that advice asks for.
        "--calibrate-wandb=off", "--calibrate-every=50000", options=RESTARTS,
    ).stdout  # fmt: skip
    (path,) = (tmp_path / "out" / "runs").glob("*/stop.json")
    marker = json.loads(path.read_text(encoding="utf-8"))
    decision = json.loads(
        (tmp_path / "out" / "latest" / "decision.json").read_text(encoding="utf-8")
    )
    last = marker["iteration"]
    before = losses(output)
    assert list(before) == list(range(1, last + 1)), "begun once, ended at the agreed iteration"
    assert "window reopens" in output
    assert "stop" in check_written_files(tmp_path / "out")
    assert (decision["action"], marker["rule"]) == ("stop", "deadline")
    assert decision["launch_id"] == marker["launch_id"] == path.parent.name
    assert decision["run_id"] == marker["run_id"] and decision["command"] == marker["command"]

    (folder,) = (tmp_path / "saved").glob("iter_*")
    states = [torch.load(path, weights_only=True) for path in sorted(folder.iterdir())]
    assert [state["iteration"] for state in states] == [last, last]

    command = marker["command"]
    assert command[command.index("--load") + 1] == "saved"
    resumed = torchrun(tmp_path, *command, "--exit-interval", str(last + 2), options=RESTARTS)
    after = losses(resumed.stdout)
    assert list(after) == [last + 1, last + 2]
    recent = [loss for step, loss in before.items() if step > last - 40]
    assert abs(fmean(after.values()) - fmean(recent)) < 3 * stdev(recent)
