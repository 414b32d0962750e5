"""predict, plan and report answer on a machine that has neither torch nor megatron."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from golden_copies import golden_copy

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
GOLDEN = golden_copy("cpu_dp2")
ABSENT = ("torch", "functorch", "torchgen", "megatron", "nvidia", "triton", "__editable__")
CODE = """
import importlib.util, sys
sys.path[:0] = [{links!r}]
assert importlib.util.find_spec("torch") is None
from forerun.launch.cli import main
code = main({argv!r})
assert not {{"torch", "megatron", "wandb"}} & set(sys.modules)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every installed package but those of the training environment, and this checkout."""
    home = tmp_path_factory.mktemp("no_torch") / "site"
    home.mkdir()
    for entry in Path(np.__file__).parent.parent.iterdir():
        if not entry.name.startswith(ABSENT):
            (home / entry.name).symlink_to(entry)
    if not (home / "forerun").exists():
        (home / "forerun").symlink_to(ROOT)
    return home


def run(links: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    code = CODE.format(links=str(links), argv=list(argv))
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )


def test_predict_answers_for_another_layout(links: Path) -> None:
    done = run(links, "predict", str(GOLDEN), "--tensor-model-parallel-size", "2", "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert (value["tp"], value["dp"]) == (2, 1)
    assert 0 < value["low_s"] < value["step_time_s"] < value["high_s"]


def test_plan_ranks_layouts_on_more_ranks(links: Path) -> None:
    done = run(links, "plan", str(GOLDEN), "--gpus", "4", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["candidates"]
    assert result and all(c["num_ranks"] == 4 for c in result)
    times = [c["step_time_s"] for c in result]
    assert times == sorted(times)


def test_report_tells_of_the_recorded_run(links: Path) -> None:
    done = run(links, "report", str(GOLDEN), "--full")
    assert done.returncode == 0, done.stderr
    assert "measured" in done.stdout and "Operator models" in done.stdout
