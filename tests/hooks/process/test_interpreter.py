"""Which Python answers: this one, one that is named, or none, in which case one line says how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forerun
from forerun.hooks.control.companion_link import companion_environment
from forerun.hooks.process.interpreter import (
    PACKAGES,
    companion_command,
    missing_packages,
    no_live_answers_message,
    objection,
)

ROOT = Path(__file__).parents[3]
IN_A_BARE_PYTHON = """
import json, sys
sys.path.insert(0, {home!r})
from forerun.hooks.process.interpreter import companion_command, no_live_answers_message
print(json.dumps(companion_command({environ!r}, {python!r})))
print(no_live_answers_message("runs"))
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "forerun").symlink_to(ROOT)
    return tmp_path


def bare(home: Path, environ: dict[str, str], python: str = "") -> tuple[tuple[str, ...], str]:
    code = IN_A_BARE_PYTHON.format(home=str(home), environ=environ, python=python)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    command, line = done.stdout.splitlines()
    return tuple(json.loads(command)), line


def start(command: tuple[str, ...], cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """The companion with nothing to read; it ends with its input."""
    return subprocess.run(
        [*command, "--help"], input="", capture_output=True, text=True, check=False,
        cwd=cwd, env={**os.environ, **environ},
    )  # fmt: skip


def test_another_python_is_found_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert companion_command({}, "venv/bin/python")[0] == str(tmp_path / "venv/bin/python")
    assert companion_command({}, "python3.12")[0] == "python3.12"


def test_the_packages_here_answer_whatever_the_variable_says() -> None:
    assert missing_packages() == []
    here = companion_command({})
    assert here[:2] == (sys.executable, "-c") and "forerun.companion" in here[2]
    assert companion_command({"FORERUN_PYTHON": "/opt/other/bin/python"}) == here


def test_the_flag_names_another_one_in_any_case(home: Path) -> None:
    for environ in ({}, {"FORERUN_PYTHON": "/opt/image/bin/python"}):
        assert companion_command(environ, "/opt/other/bin/python")[0] == "/opt/other/bin/python"
        assert bare(home, environ, "/opt/other/bin/python")[0][0] == "/opt/other/bin/python"


def test_without_the_packages_the_variable_answers_or_nobody(home: Path) -> None:
    command, _ = bare(home, {"FORERUN_PYTHON": "/opt/image/bin/python"})
    assert command[0] == "/opt/image/bin/python"
    command, line = bare(home, {})
    assert command == ()
    assert "numpy, scipy, pandas" in line and "forerun report runs" in line
    assert "--calibrate-python=PATH" in line and "\n" not in line


def test_the_other_python_reads_nothing_of_training_s_environment(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    for name in ("json", "argparse", "forerun"):
        (trap / f"{name}.py").write_text("raise SystemExit('of training')\n")
    command = companion_command({}, sys.executable)
    done = start(command, trap, PYTHONPATH=str(trap), PYTHONHOME=str(trap))
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


NOT_OF_THE_PATH = {"antigravity", "this", "idlelib", "lib2to3", "turtledemo", "__future__"}
CHANGING = {
    "PYTHONSTARTUP": "trap.py",
    "PYTHONINSPECT": "1",
    "PYTHONWARNINGS": "error",
    "PYTHONOPTIMIZE": "2",
    "PYTHONPROFILEIMPORTTIME": "1",
    "PYTHONVERBOSE": "1",
    "PYTHONDEVMODE": "1",
    "PYTHONTRACEMALLOC": "9",
    "PYTHONHASHSEED": "abc",
    "PYTHONIOENCODING": "ascii:strict",
    "PYTHONCASEOK": "1",
}


def trap(folder: Path) -> Path:
    """A folder with a file under the name of every module that our programs may import."""
    names = {*sys.stdlib_module_names, *(module for module, _ in PACKAGES.values())}
    names |= {"sitecustomize", "usercustomize", "yaml", "xgboost", "wandb", "forerun", "trap"}
    for name in names - NOT_OF_THE_PATH:
        text = f"open({str(folder / 'ran')!r}, 'a').write({name!r} + '\\n')\nraise SystemExit(9)\n"
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.mark.parametrize("path", ["", ".", "{here}", "{here}/../{name}", ":/nowhere"])
def test_nothing_of_the_working_directory_runs_nor_what_changes_python(
    tmp_path: Path, path: str
) -> None:
    here = trap(tmp_path)
    path = path.format(here=here, name=here.name)
    before = os.getcwd()
    os.chdir(here)
    try:
        environ = companion_environment({**os.environ, **CHANGING, "PYTHONPATH": path})
    finally:
        os.chdir(before)
    code = "; import json, numpy, pandas, rich, jinja2, sklearn, pyarrow.parquet; sys.exit(main())"
    command = [*companion_command({})[:2], companion_command({})[2].rpartition(";")[0] + code]
    done = subprocess.run(
        [*command, "--help"], cwd=here, env=environ, capture_output=True, text=True, check=False
    )
    assert not (here / "ran").exists(), (here / "ran").read_text()
    assert done.returncode == 0 and "usage" in done.stdout and done.stderr == ""


def test_the_command_line_as_a_module_runs_nothing_of_the_working_directory(tmp_path: Path) -> None:
    here = trap(tmp_path)
    for name in ("runpy", "pkgutil", "importlib", "zipimport", "forerun"):  # of -m itself
        (here / f"{name}.py").unlink(missing_ok=True)
    words = [sys.executable, "-m", "forerun", "status", str(tmp_path)]
    done = subprocess.run(words, cwd=here, capture_output=True, text=True, check=False)
    assert not (here / "ran").exists(), (here / "ran").read_text()
    assert done.returncode == 3 and "holds no run" in done.stderr


def test_a_python_without_forerun_says_what_to_do(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    done = start(companion_command({}, str(python)), tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "has no forerun" in done.stderr
    assert f"pip install '{ROOT}[analysis]'" in done.stderr


def test_another_version_is_said(home: Path) -> None:
    assert objection(forerun.__version__) == ""
    message = objection("0.0.9")
    assert f"has forerun {forerun.__version__} and training has 0.0.9" in message
    assert f"install version 0.0.9 there: pip install '{ROOT}[analysis]'" in message


def test_the_line_tells_the_directory() -> None:
    assert "records are kept in /data/run;" in no_live_answers_message("/data/run")
