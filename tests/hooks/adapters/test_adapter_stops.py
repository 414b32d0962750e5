"""A stop in other frameworks' loops: asked for by a file, followed after a step, saved."""

from __future__ import annotations

import json
import re
from pathlib import Path

import adapter_stops as script
import pytest
from launched import Launch

from forerun.calib.records.run_values import MARKER
from forerun.hooks.process.launch_identity import LAUNCH_ID, launch_folder

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "saved"),
    [("hugging_face", "checkpoint-{}"), ("lightning", "stopped-step={}.ckpt")],
)
def test_a_request_ends_training_with_a_checkpoint_of_its_last_step(
    tmp_path: Path, kind: str, saved: str
) -> None:
    environ = {"WANDB_MODE": "disabled", LAUNCH_ID: "asked"}
    done = Launch(tmp_path, script.__file__, kind, tmp_path, **environ).end_well()
    (last,) = map(int, re.findall(r"ENDED (\d+)", done.stdout))
    assert script.STOP_STEP < last < script.STEPS
    assert (tmp_path / "saved" / saved.format(last)).exists()
    path = launch_folder(tmp_path / "out", "asked") / MARKER
    marker = json.loads(path.read_text(encoding="utf-8"))
    assert (marker["iteration"], marker["rule"]) == (last, "request")
