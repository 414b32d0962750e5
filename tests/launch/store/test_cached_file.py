"""A cached answer is read back while nothing that it stands on has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.launch.store import cached_file
from forerun.launch.store.cached_file import CachedFile

NAME = "answer-*.bin"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory with one record, and one with other evidence."""
    for name in ("run", "other"):
        records = tmp_path / name / "records" / "r"
        records.mkdir(parents=True)
        (records / "rank-0.jsonl").write_text("{}\n")
    return tmp_path / "run"


def cached(home: Path, *question: object) -> CachedFile:
    return CachedFile(NAME, question, home, home.parent / "other", read=("asked.json",))


def test_an_answer_is_read_back_and_is_of_its_question(home: Path) -> None:
    assert cached(home).read() == b""
    cached(home).write(b"one")
    cached(home, 2).write(b"two")
    assert cached(home).read() == b"one" and cached(home, 2).read() == b"two"
    assert len(list(home.glob(NAME))) == 2


@pytest.mark.parametrize("path", ["records/r/rank-0.jsonl", "../other/records/r/a", "asked.json"])
def test_what_is_written_after_the_question_is_no_part_of_the_answer(home: Path, path: str) -> None:
    early = cached(home)
    (home / path).write_text("changed\n")
    early.write(b"old")
    assert cached(home).read() == b""


@pytest.mark.parametrize("path", ["calib/search/space.py", "launch/known/one.py", "calib/a/b.json"])
def test_other_code_is_another_answer(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
) -> None:
    monkeypatch.setattr(cached_file, "_PACKAGE", tmp_path)
    cached(home).write(b"old")
    assert cached(home).read() == b"old"
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("new = 1\n")
    assert cached(home).read() == b""


@pytest.mark.parametrize("change", [lambda p: p.chmod(0o666), Path.unlink])
def test_what_another_user_could_write_is_not_read(
    home: Path, change: Callable[[Path], None]
) -> None:
    cached(home).write(b"mine")
    (path,) = home.glob(NAME)
    assert path.stat().st_mode & 0o777 == 0o600
    change(path)
    assert cached(home).read() == b""


def test_the_oldest_go_and_other_files_stay(home: Path) -> None:
    other = home / "answer-model.bin"
    other.touch()
    for number in range(12):
        cached(home, number).write(b"created_by: forerun %d" % number)
    assert other.exists() and len(list(home.glob(NAME))) == 8 + 1
    assert cached(home, 11).read() == b"created_by: forerun 11"


def test_a_folder_that_takes_no_file_is_passed_over(home: Path) -> None:
    one = cached(home)
    one.write(b"")
    (path,) = home.glob(NAME)
    path.unlink()
    path.mkdir()
    one.write(b"one")
    assert one.read() == b""
