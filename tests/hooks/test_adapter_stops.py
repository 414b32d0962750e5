"""A stop in other frameworks' loops: asked for by a file, followed after a step, saved."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import adapter_stops as script
import pytest

from forerun.hooks.control.orders import MARKER
from forerun.hooks.process.launch_identity import LAUNCH_ID, launch_folder

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "saved"),
    [("hugging_face", "checkpoint-{}"), ("lightning", "stopped-step={}.ckpt")],
)
def test_a_request_ends_training_with_a_checkpoint_of_its_last_step(
    tmp_path: Path, kind: str, saved: str
) -> None:
    left_out = ("WANDB", "FORERUN", "RANK", "WORLD_SIZE", "LOCAL_")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    done = subprocess.run(
        [sys.executable, script.__file__, kind, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", LAUNCH_ID: "asked"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (last,) = map(int, re.findall(r"ENDED (\d+)", done.stdout))
    assert script.ASKED < last < script.STEPS
    assert (tmp_path / "saved" / saved.format(last)).exists()
    path = launch_folder(tmp_path / "out", "asked") / MARKER
    marker = json.loads(path.read_text(encoding="utf-8"))
    assert (marker["iteration"], marker["rule"]) == (last, "request")
