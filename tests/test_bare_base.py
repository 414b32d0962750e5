"""The base needs the standard library and torch: recording, ``run``, ``doctor`` and help work."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.hooks.process.interpreter import PACKAGES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
TRAINING = ("__init__.py", "_forerun_autoload.py", "launch/__main__.py", "launch/autoload.py")
NOT_IN_TRAINING = {"hooks/probing/probe_sweep.py"}
"""Modules of the verb ``probe``, which says what it lacks."""
GUARDED = {
    *("calib/advice/probes.py", "calib/forecast/_remaining_time.py", "launch/opened/run.py"),
    "launch/verbs/lint.py",
}
"""Imported only where numpy has been found: ``hooks/session/_trace_turns.py`` asks first; where a
session asks the facade for it; where ``doctor`` is asked of a launch.  The distribution of the
remaining time imports it where a forecast with failures is made, not where one is read."""
HOSTS = {"torch", "megatron", "transformers", "lightning", "pytorch_lightning", "torchtitan"}
OUR_PACKAGES = {"forerun"}
BARE = """
import sys
sys.path[:] = [{home!r}, *(p for p in sys.path if "site-packages" not in p)]
from forerun.launch.cli import main
code = main({argv!r})
assert not {{"numpy", "pandas", "rich", "torch"}} & set(sys.modules)
sys.exit(code)
"""


def _imports(path: Path) -> Iterator[tuple[str, Path | None]]:
    """(top-level name, file of ours) of all imports, those in functions and for types too."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0], None
        elif isinstance(node, ast.ImportFrom):
            stem = (*package[: len(package) - node.level + 1], *(node.module or "").split("."))
            home = ROOT.joinpath(*(part for part in stem if part))
            names = [alias.name for alias in node.names]
            for file in (home, *(home / name for name in names)):
                for result in (file.with_suffix(".py"), file / "__init__.py"):
                    if result.is_relative_to(ROOT) and result.exists():
                        yield "", result


def _foreign(starts: list[Path]) -> set[tuple[str, str]]:
    """(file, package) of all that is neither ours nor the standard library's, transitively."""
    results, seen, todo = set(), set(starts), list(starts)
    while todo:
        path = todo.pop()
        for name, file in _imports(path):
            if file is None and name not in sys.stdlib_module_names:
                results.add((path.relative_to(ROOT).as_posix(), name))
            elif file is not None and file not in seen:
                seen.add(file)
                if file.relative_to(ROOT).as_posix() not in GUARDED:
                    todo.append(file)
    return results


def test_what_trains_imports_the_standard_library_and_its_host() -> None:
    hooks = [
        path
        for path in (ROOT / "hooks").rglob("*.py")
        if path.relative_to(ROOT).as_posix() not in NOT_IN_TRAINING
    ]
    results = _foreign([*hooks, *(ROOT / name for name in TRAINING)])
    assert not {(path, name) for path, name in results if name not in HOSTS | OUR_PACKAGES}


def test_run_and_doctor_import_the_standard_library() -> None:
    results = _foreign([ROOT / "launch" / name for name in ("verbs/run.py", "verbs/doctor.py")])
    # Only where the companion opens a run of its own there.
    foreign = {(path, name) for path, name in results if name not in HOSTS | OUR_PACKAGES}
    assert foreign <= {("launch/sinks/wandb_sink.py", "wandb")}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds this package and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "forerun").symlink_to(ROOT)
    return folder


def bare(home: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """The command line with the standard library alone."""
    code = BARE.format(home=str(home), argv=list(argv))
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True, text=True, check=False, cwd=home,
    )  # fmt: skip


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["plan", "--help"]])
def test_help_and_version_need_nothing(home: Path, argv: list[str]) -> None:
    done = bare(home, *argv)
    assert done.returncode == 0, done.stderr
    assert "forerun" in done.stdout


def test_run_hands_the_exit_code_on(home: Path) -> None:
    done = bare(home, "run", "--", sys.executable, "-c", "import sys; sys.exit(7)")
    assert done.returncode == 7, done.stderr


def test_doctor_says_what_answers_lack_and_where_they_can_be(home: Path) -> None:
    done = bare(home, "doctor")
    assert "not available here; training is still recorded" in done.stdout, done.stderr
    assert "numpy, scipy, pandas" in done.stdout and "--calibrate-python=PATH" in done.stdout


def test_doctor_looks_at_words_alone(home: Path) -> None:
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    words = f"torchrun --nproc-per-node 2 t.py {sizes} --bf16 --micro-batch-size 1 --vocab-size 128"
    done = bare(home, "doctor", "--", *words.split())
    assert done.returncode == 0, done.stderr
    assert "1. --overlap-grad-reduce is not given" in done.stdout


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "runs"],
        ["predict", "runs"],
        ["report", "runs"],
        ["doctor", "runs"],
        ["import", "kineto", "trace.json", "--out", "table.csv"],
        ["probe", "--out", "runs"],
    ],
)
def test_a_verb_that_needs_the_extra_says_so(home: Path, argv: list[str]) -> None:
    done = bare(home, *argv)
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"forerun: {argv[0]} needs numpy, scipy, pandas, ")
    assert done.stderr.endswith(f": pip install '{ROOT}[analysis]'\n")


def test_the_base_requires_nothing_and_the_floors_are_written_once() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert not setup.get("options", "install_requires", fallback="").strip()
    lines = setup["options.extras_require"]["analysis"].splitlines()
    requirements = dict(line.split(">=") for line in lines if line and not line.startswith("#"))
    floors = {
        name: tuple(map(int, re.findall(r"\d+", text))) for name, text in requirements.items()
    }
    assert {name: oldest for name, (_, oldest) in PACKAGES.items()}.items() <= floors.items()
