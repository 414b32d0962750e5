"""A leaf is gone by deleting its files: everything else still loads, and answers as it did."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAVES: dict[str, tuple[str, ...]] = {
    **{
        f"sink {name}": (f"launch/sinks/{name}_sink.py",)
        for name in ("wandb", "tensorboard", "prometheus", "trainjob", "slurm")
    },
    **{
        f"adapter {name}": (f"hooks/adapters/{name}.py",)
        for name in ("bridge", "hugging_face", "lightning", "torchtitan")
    },
    "import kineto": ("calib/importers/kineto.py", "calib/importers/kineto_origins.py"),
    "import nccl-tests": ("calib/importers/nccl_tests.py",),
    "import nccl-inspector": ("calib/importers/nccl_inspector.py",),
    "import log": ("calib/importers/training_log.py", "launch/companion/replay.py"),
    "normal": ("launch/verbs/normal.py", "launch/views/normal.schema.json"),
    "wrapper": ("launch/verbs/run.py", "launch/wrapper"),
    "probes": ("launch/verbs/probe.py", "hooks/probing"),
    "what-if": (
        "calib/answers/what_if.py",
        "launch/views/what_if.py",
        "launch/views/templates/what_if.js",
    ),
}
"""Files of each leaf."""
QUESTIONS = ("cpu_report", "cpu_status")
CHECK = """
import importlib, json, sys, tempfile
from pathlib import Path
root = Path(sys.argv[1])
for folder in ("calib", "hooks", "launch"):
    for path in sorted((root / folder).rglob("*.py")):
        name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        importlib.import_module(name.removesuffix(".__init__"))
import forerun
assert Path(forerun.__file__).parent == root, forerun.__file__
from forerun.benchmarks import golden_answers as golden
with tempfile.TemporaryDirectory() as home, golden.at_home(Path(home)):
    golden.make_directories(Path(home), packed=(), is_imported=False)
    for name in sys.argv[2:]:
        lines = golden.answer_differences(name, golden.ask(golden.QUESTIONS[name]))
        print(json.dumps(lines))
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, with the folders that only golden answers read linked into it."""
    root = tmp_path_factory.mktemp("leaves") / "forerun"
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("calib", "hooks", "launch"):
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, root / path.name)
    for folder in ("benchmarks", "tests", "recipes"):
        (root / folder).symlink_to(ROOT / folder)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAVES)
def test_without_a_leaf_the_rest_answers_as_it_did(name: str, copied: Path, tmp_path: Path) -> None:
    root = tmp_path / "forerun"
    shutil.copytree(copied, root, symlinks=True)
    for leaf in LEAVES[name]:
        path = root / leaf
        assert path.exists(), f"{leaf} of {name} is not there"
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    command = [sys.executable, "-c", CHECK, str(root), *QUESTIONS]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    differences = [line for text in done.stdout.splitlines() for line in json.loads(text)]
    assert not [line for line in differences if not may_differ(name, line)]


def may_differ(name: str, line: str) -> bool:
    """Return whether a difference is the leaf itself: choices of the answer that only it shows."""
    return name == "what-if" and ".what_if" in line
