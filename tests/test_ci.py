"""``.ci/run`` in a repository of its own, with a ``make`` that only says what it was asked for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"
AUTHOR = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b.c"}
GIT = AUTHOR | {name.replace("AUTHOR", "COMMITTER"): text for name, text in AUTHOR.items()}


def run(directory: Path, *words: object, **environ: str) -> str:
    variables = {"PATH": os.environ["PATH"], "HOME": str(directory), **GIT, **environ}
    return subprocess.run(
        [*map(str, words)], cwd=directory, env=variables, check=True, capture_output=True, text=True
    ).stdout


def commit(directory: Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.read_text() + "x" if path.exists() else "x")
    run(directory, "git", "add", ".")
    run(directory, "git", "commit", "--quiet", "--message=x")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    directory = tmp_path / "repository"
    (directory / ".ci").mkdir(parents=True)
    (directory / ".ci" / "run").write_text(SCRIPT.read_text())
    run(directory, "git", "init", "--quiet", "--initial-branch=main")
    commit(directory, "hooks/one.py", "README.md", "docs/one.md")
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text('#!/bin/sh\necho "$@"\n')
    make.chmod(0o755)
    return directory


def targets(repository: Path, **environ: str) -> list[str]:
    """Return what ``make`` was asked for, and what else was said."""
    path = f"{repository.parent / 'bin'}:{os.environ['PATH']}"
    return run(repository, "bash", ".ci/run", PATH=path, **environ).splitlines()


@pytest.mark.parametrize(
    ("changed", "environ", "expected"),
    [
        ("hooks/one.py", {}, ["test-newest"]),
        ("benchmarks/one.py", {}, ["test-nightly"]),
        ("tests/docs/test_one.py", {}, ["test-nightly"]),
        ("tests/hooks/test_one.py", {}, []),
        ("README.md", {}, []),
        ("README.md", {"FORERUN_NEWEST": "1"}, ["test-newest"]),
        ("README.md", {"FORERUN_NIGHTLY": "1"}, ["test-nightly"]),
    ],
)
def test_what_is_nightly_runs_where_its_files_changed_or_it_is_asked_for(
    repository: Path, changed: str, environ: dict[str, str], expected: list[str]
) -> None:
    commit(repository, changed)
    *others, nightly, newest = targets(repository, **environ)
    assert others == ["setup", "check", "docs", "test-all", "quickstart"]
    assert [one for one in (nightly, newest) if "skipped" not in one] == expected
    assert "test-newest" in expected or "FORERUN_NEWEST=1" in newest
    assert "test-nightly" in expected or "FORERUN_NIGHTLY=1" in nightly


def test_a_branch_is_held_against_what_it_began_from(repository: Path) -> None:
    run(repository, "git", "update-ref", "refs/remotes/origin/main", "HEAD")
    commit(repository, "hooks/one.py")
    commit(repository, "README.md")
    assert targets(repository)[-1] == "test-newest"


def test_the_main_branch_is_held_against_a_day_ago(repository: Path) -> None:
    before = {f"GIT_{who}_DATE": "2026-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")}
    run(repository, "git", "commit", "--quiet", "--amend", "--no-edit", **before)
    commit(repository, "hooks/one.py")
    commit(repository, "README.md")
    run(repository, "git", "update-ref", "refs/remotes/origin/main", "HEAD")
    assert targets(repository)[-1] == "test-newest"


def test_without_an_earlier_commit_to_compare_with_it_is_tried(repository: Path) -> None:
    assert targets(repository)[-1] == "test-newest"
