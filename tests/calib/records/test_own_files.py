"""Files that are added to: only our own regular ones, whatever lies in their place, at once."""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.calib.records import files
from forerun.calib.records.files import append_line, open_owned

ROOT = Path(__file__).parents[3]


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("victim"))


def link(path: Path) -> None:
    path.with_name("victim").write_text("the victim's\n")
    dangling(path)


IN_THE_WAY: dict[str, Callable[[Path], object]] = {
    "dangling": dangling,
    "link": link,
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/null"),
}


def line_of(number: int) -> str:
    return f'{{"created_by": "forerun", "a": {number}}}\n'


def victim_of(path: Path) -> str:
    victim = path.with_name("victim")
    return victim.read_text() if victim.exists() else ""


@pytest.mark.parametrize("kind", IN_THE_WAY)
def test_what_is_no_file_of_ours_is_not_written_to_and_nobody_waits(
    tmp_path: Path, kind: str
) -> None:
    """In a process of its own: without the rule a pipe holds it for ever."""
    path = tmp_path / "a.jsonl"
    IN_THE_WAY[kind](path)
    before = victim_of(path)
    code = (
        "import pathlib, sys; from forerun.calib.records.files import append_line\n"
        "try:\n  append_line(pathlib.Path(sys.argv[1]), {})\n"
        "except OSError as err: print(err.filename, err.strerror)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(f"{path} a link, a pipe") and "remove it" in done.stdout
    assert victim_of(path) == before
    assert path.is_symlink() or not path.is_file()


def test_a_pipe_that_somebody_reads_gets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="remove it"):
        open_owned(path)
    assert os.read(reader, 10) == b""
    os.close(reader)


def test_a_pipe_that_comes_in_between_is_closed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at once more behind the open."""
    path, other = tmp_path / "a.jsonl", tmp_path / "other"
    os.mkfifo(path)
    other.write_text("")
    monkeypatch.setattr(files.Path, "lstat", lambda self: other.stat())
    begin_s, num_open = time.monotonic(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="remove it"):
        open_owned(path)
    assert time.monotonic() - begin_s < 5 and len(os.listdir("/proc/self/fd")) == num_open


def test_another_user_s_file_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    append_line(path, {"a": 1})
    real = os.fstat

    def as_of_another(handle: int) -> os.stat_result:
        values = list(real(handle))
        values[stat.ST_UID] += os.readlink(f"/proc/self/fd/{handle}") == str(path)
        return os.stat_result(values)

    monkeypatch.setattr(files.os, "fstat", as_of_another)
    with pytest.raises(OSError, match="another user's"):
        append_line(path, {"a": 2})
    assert path.read_text() == line_of(1) and os.listdir(tmp_path) == ["a.jsonl"]


def test_a_mount_that_says_another_owner_of_all_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS that takes root for nobody, SMB, FUSE: there our own files are never ours."""
    path = tmp_path / "a.jsonl"
    append_line(path, {"a": 1})
    monkeypatch.setattr(files.os, "geteuid", lambda: 4_000_000)
    append_line(path, {"a": 2})
    assert path.read_text() == line_of(1) + line_of(2) and os.listdir(tmp_path) == ["a.jsonl"]


def test_a_torn_last_line_stays_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.jsonl"
    append_line(path, {"a": 1})
    with path.open("a") as file:
        file.write("[2")
    append_line(path, {"a": 3})
    assert path.read_text() == line_of(1) + "[2\n" + line_of(3)


@pytest.mark.parametrize("text", ["the user's\n", '{"a": 1}\n', " "])
def test_lines_of_others_are_not_added_to(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(FileExistsError, match="not written by forerun"):
        append_line(path, {"a": 1})
    assert path.read_text() == text


def test_nobody_else_opens_a_file_to_write() -> None:
    """Files are replaced or added to by ``calib.records.files``, which says what it follows, and
    leaves what is not ours."""
    wrong = []
    for folder in ("calib", "hooks", "launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name == "files.py" and path.parent.name == "records":
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and writes(node):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def writes(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    name = node.func.id if isinstance(node.func, ast.Name) else name
    if name in ("write_bytes", "mkstemp", "NamedTemporaryFile", "copyfile", "move"):
        return True
    if name in ("to_csv", "to_parquet", "savez", "write_table"):  # not by a path
        return any("path" in ast.unparse(argument) for argument in node.args)
    texts = {one.value for one in (*node.args, *(k.value for k in node.keywords)) if is_text(one)}
    return name == "open" and any(re.fullmatch("[rwaxbt+]*[wax+][rwaxbt+]*", one) for one in texts)


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
