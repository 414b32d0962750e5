"""Mixtures of experts in loops of PyTorch on two real ranks: an end, and layouts beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytestmark = pytest.mark.nightly
SCRIPT = Path(__file__).parents[2] / "support" / "launched_loop.py"
WORDS = "--calibrate --calibrate-steps=6 --calibrate-wandb=off --calibrate-total-steps=24"


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_experts_have_an_end_and_layouts(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        "--nproc-per-node",
        "2",
        str(SCRIPT),
        kind,
        "--experts",
        "--steps=24",
        *WORDS.split(),
    ]
    # Not a fork of a process with torch: threads of transformers do not survive one.
    done = subprocess.run(
        [*command, f"--calibrate-dir={tmp_path / 'out'}"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "no answer" not in done.stdout + done.stderr
    answer = json.loads((tmp_path / "out" / "latest" / "answer.json").read_text())
    assert answer["forecast"]["step_time_s"] > 0 and not answer["forecast"]["reason_no_finish"]
    assert answer["plan"]["candidates"] and answer["plan"]["own"]["dp"] == 2
