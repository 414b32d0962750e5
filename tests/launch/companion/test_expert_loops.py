"""Mixtures of experts in loops of PyTorch on two real ranks: an end, and layouts beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launched import torchrun

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "support" / "expert_loops.py"
WORDS = "--calibrate --calibrate-steps=6 --calibrate-wandb=off --calibrate-total-steps=24"


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_experts_have_an_end_and_layouts(tmp_path: Path, kind: str) -> None:
    done = torchrun(tmp_path, SCRIPT, kind, *WORDS.split(), f"--calibrate-dir={tmp_path / 'out'}")
    assert "[forerun] ends " in done.stdout and "no answer" not in done.stdout
    decision = json.loads((tmp_path / "out" / "decision.json").read_text())
    assert not [line for line in decision["transcript"] if "not compared" in line]
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["candidates"] and plan["own"]["dp"] == 2
