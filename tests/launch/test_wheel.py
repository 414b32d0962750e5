"""The wheel beside nothing but torch: training is recorded there, another Python answers.

What a wheel lacks is found only where nothing else is installed, and under a real launcher.
"""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
TRAIN = """
import importlib.util, os, sys
import torch
import torch.distributed as dist
from torch import nn

assert importlib.util.find_spec("numpy") is None and importlib.util.find_spec("pandas") is None
assert not [a for a in sys.argv if "alibrate" in a]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
print("trained", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and from it the wheel, as ``make dist`` does."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(list(out.glob("*.tar.gz"))) == 1
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has torch, what torch requires but for NumPy, and the wheel."""
    home = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    for entry in _entries("torch", set()):
        if not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    return python


def _entries(name: str, seen: set[str]) -> Iterator[Path]:
    """Top-level folders and files of a distribution and of what it requires."""
    seen.add(name)
    distribution = metadata.distribution(name)
    tops = {
        file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "bin")
    }
    yield from (Path(str(distribution.locate_file(top))) for top in tops if top != "__pycache__")
    for text in distribution.requires or ():
        needed = Requirement(text)
        if needed.name not in seen and (not needed.marker or needed.marker.evaluate({"extra": ""})):
            yield from _entries(needed.name, seen)


def _run(python: Path | str, *argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    dropped = ("PYTHONPATH", "PYTHONHOME", "RANK", "WORLD_SIZE")
    inherited = {k: v for k, v in os.environ.items() if k not in dropped and "FORERUN" not in k}
    return subprocess.run(
        [str(python), *argv], cwd=cwd, capture_output=True, text=True, check=False, timeout=300,
        env={**inherited, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"},
    )  # fmt: skip


def _train(python: Path, cwd: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (cwd / "train.py").write_text(TRAIN)
    done = _run(
        python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "train.py", "--calibrate", "--calibrate-steps=6", "--calibrate-dir=runs", *flags, cwd=cwd,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("trained") == 2
    return done


def test_the_wheel_holds_the_packages_and_their_data_alone(wheel: Path) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = {name.replace(".", "/") for name in setup["options"]["packages"].split()}
    files = zipfile.ZipFile(wheel).namelist()
    code = {name for name in files if name.endswith(".py")}
    here = {f"{p}/{f.name}" for p in listed for f in (ROOT / p[len("forerun/") :]).glob("*.py")}
    modules = {f"{name}.py" for name in setup["options"]["py_modules"].split()}
    assert code == here - {"forerun/setup.py"} | modules
    for name in ("py.typed", "calib/fit/priors.json", "launch/views/templates/report.html"):
        assert f"forerun/{name}" in files
    for name in ("megatron_names.json", "kept_names.json"):
        assert f"forerun/calib/arguments/{name}" in files
    suffixes = (".md", ".sbatch", ".sh", ".yaml")
    data = {f.name for f in (ROOT / "recipes").glob("*") if f.suffix in suffixes}
    assert data and {f"forerun/recipes/{name}" for name in data} <= set(files)
    assert any(name.startswith("forerun/recipes/published/steps_") for name in files)
    assert any(name.endswith("/licenses/LICENSE") for name in files)


def test_records_wait_for_another_python_which_answers(python: Path, tmp_path: Path) -> None:
    done = _train(python, tmp_path)
    messages = [line for line in (done.stdout + done.stderr).splitlines() if "[forerun]" in line]
    assert len([line for line in messages if f"`forerun report {tmp_path}/runs`" in line]) == 1, (
        messages
    )
    assert not list((tmp_path / "runs").glob("report.*"))
    here = _run(python, "-m", "forerun", "report", "runs", cwd=tmp_path)
    assert here.returncode == 2
    assert here.stderr.startswith("forerun: report needs numpy") and here.stderr.count("\n") == 1
    answer = _run(sys.executable, "-m", "forerun", "report", "runs", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "· step " in answer.stdout and "checked: " in answer.stdout


def test_another_python_answers_live(python: Path, tmp_path: Path) -> None:
    done = _train(python, tmp_path, f"--calibrate-python={sys.executable}")
    assert "no live answers" not in done.stdout + done.stderr
    assert "· step " in done.stdout, done.stdout + done.stderr
