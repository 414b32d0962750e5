"""Replaced at once, under names that nobody can prepare, with the rights that were asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

import pytest

from forerun.calib.records import files
from forerun.calib.records.files import OPEN, PRIVATE, replace_by, replace_file, write_text


@pytest.fixture
def umask_22() -> object:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask_22")
@pytest.mark.parametrize(("mode", "seen"), [(OPEN, 0o644), (PRIVATE, 0o600)])
def test_rights_follow_the_umask_or_are_the_owners_alone(
    tmp_path: Path, mode: int, seen: int
) -> None:
    replace_file(tmp_path / "deep" / "a.json", "{}", mode=mode)
    assert (tmp_path / "deep" / "a.json").stat().st_mode & 0o777 == seen


def test_a_link_at_the_place_stays_as_its_target_does(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("the user's")
    (tmp_path / "a.json").symlink_to(target)
    with pytest.raises(FileExistsError, match="not written by forerun"):
        replace_file(tmp_path / "a.json", "ours")
    assert target.read_text() == "the user's"
    assert (tmp_path / "a.json").readlink() == target


def test_a_link_that_waits_under_the_temporary_name_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.write_text("the user's")
    monkeypatch.setattr(files.os, "urandom", bytes)
    (tmp_path / f".a.json.{'00' * 8}.tmp").symlink_to(target)
    with pytest.raises(FileExistsError):
        replace_file(tmp_path / "a.json", "ours")
    assert target.read_text() == "the user's"


def test_nothing_is_left_where_writing_fails(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("before")

    def fail(file: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        replace_by(tmp_path / "a.json", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "before"


def test_two_writers_never_share_a_temporary_file(tmp_path: Path) -> None:
    names: set[str] = set()

    def write(file: IO[bytes]) -> None:
        file.write(b"created_by: forerun")
        names.update(path.name for path in tmp_path.glob(".a.*"))

    for _ in range(2):
        replace_by(tmp_path / "a", write)
    assert len(names) == 2


def test_what_has_no_utf_8_is_escaped(tmp_path: Path) -> None:
    for name in ("a.txt", "b.json.gz"):
        write_text(tmp_path / name, "d\udcff é")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "d\\udcff é"
