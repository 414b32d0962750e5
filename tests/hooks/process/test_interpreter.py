"""Which Python answers: this one, one that is named, or none, in which case one line says how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forerun
from forerun.hooks.process.interpreter import (
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


def test_the_packages_here_answer_whatever_the_variable_says() -> None:
    assert missing_packages() == []
    here = (sys.executable, "-m", "forerun.companion")
    assert companion_command({}) == here
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


def test_a_python_without_forerun_says_what_to_do(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    done = start(companion_command({}, str(python)), tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "has no forerun" in done.stderr
    assert "pip install 'forerun[analysis]'" in done.stderr


def test_another_version_is_said(home: Path) -> None:
    assert objection(forerun.__version__) == ""
    message = objection("0.0.9")
    assert f"has forerun {forerun.__version__} and training has 0.0.9" in message
    assert "pip install 'forerun[analysis]==0.0.9'" in message


def test_the_line_tells_the_directory() -> None:
    assert "records are kept in /data/run;" in no_live_answers_message("/data/run")
