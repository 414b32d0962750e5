"""Code of the pages of ``docs/extending``, applied to a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "extending"
_PACKAGE = (
    "__init__.py",
    "__main__.py",
    "_forerun_autoload.py",
    "companion.py",
    "calib",
    "hooks",
    "launch",
    "benchmarks",
)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language, in order."""
    text = (PAGES / page).read_text(encoding="utf-8")
    return [body for result, body in _BLOCK.findall(text) if result == language]


def extended(page: str, folder: Path, num_diffs: int | None = None) -> Path:
    """Return a folder for the path: the package with the page's diffs applied, or its first."""
    package = folder / "forerun"
    for name in _PACKAGE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, package / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            package.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, package / name)
    for diff in blocks(page, "diff")[:num_diffs]:
        subprocess.run(
            ["git", "apply", "--recount", "--whitespace=nowarn", "-"],
            cwd=package,
            # Otherwise git takes the folder for a part of the enclosing repository.
            env=os.environ | {"GIT_DIR": str(folder / "no-repository")},
            input=diff,
            text=True,
            check=True,
        )
    return folder


def run(code: str, path: Path, *arguments: str) -> str:
    """Return the output of a script that finds the package on ``path``."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def diff_size(page: str, num_diffs: int | None = None) -> tuple[int, int]:
    """Return the number of files that a page's diffs, or its first, touch, and of lines that they
    add."""
    lines = [line for diff in blocks(page, "diff")[:num_diffs] for line in diff.splitlines()]
    files = {line for line in lines if line.startswith("+++ ")}
    return len(files), sum(line.startswith("+") and not line.startswith("+++") for line in lines)
