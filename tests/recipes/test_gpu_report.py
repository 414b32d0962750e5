"""``make gpu-report`` at a toy size: from runs to report, figures without meaning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "runs" / "gpu_report.py"
pytestmark = pytest.mark.slow


def report(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    done = report("--out", str(tmp_path))
    assert done.returncode == 3
    assert "no GPU here" in done.stderr


def test_a_part_is_measured_and_its_samples_are_kept(tmp_path):
    pytest.importorskip("megatron.core")
    done = report("--out", str(tmp_path), "--cpu", "--only", "kineto")
    assert done.returncode in (0, 1), done.stderr
    told = json.loads((tmp_path / "report.json").read_text())
    part = told["parts"]["kineto"]
    assert not isinstance(part, str), part
    _, *rows = part["rows"]
    operators = {row[0].split(" ")[0] for row in rows}
    assert {"linear_qkv", "linear_fc2", "core_attention", "norm", "loss"} <= operators
    assert "linear_fc1 backward" in " ".join(row[0] for row in rows)
    assert "linear_fc1" in part["notes"][0]
    text = (tmp_path / "report.md").read_text()
    assert "largest difference" in text and "device: cpu" in text
    (machine,) = tmp_path.glob("measured/*/machine.json")
    assert json.loads(machine.read_text())["torch"] == torch.__version__
    assert (machine.parent / "base.parquet").exists()
