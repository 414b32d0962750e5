"""Words for files that cannot be written, against what the system raises."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.errors import unwritable

FULL = (errno.ENOSPC, errno.EDQUOT)


@given(st.sampled_from(sorted(errno.errorcode)))
def test_space_is_asked_for_where_there_is_none_alone(code: int) -> None:
    line = unwritable("records/r/rank-00000.jsonl", OSError(code, os.strerror(code)))
    assert ("free space" in line) == (code in FULL)
    assert os.strerror(code) in line and "\n" not in line
    # A limit of the process is the same in every directory.
    assert ("--calibrate-dir" in line) == (code not in (errno.EFBIG, errno.EMFILE))


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("a file for a folder", "remove it"),
        ("a folder for a file", "remove it"),
        ("a long name", "choose"),
    ],
)
def test_a_failure_of_the_system_gets_the_remedy_of_its_kind(
    kind: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    path = {
        "a file for a folder": tmp_path / "file" / "rank.jsonl",
        "a folder for a file": tmp_path,
        "a long name": tmp_path / ("x" * 300),
    }[kind]
    with pytest.raises(OSError) as raised:
        path.open("w")
    line = unwritable(path, raised.value)
    assert line.startswith(f"cannot write {path} (") and remedy in line.partition("; ")[2]


def test_an_error_without_a_number_keeps_its_words() -> None:
    line = unwritable("a", OSError("there is no process group"))
    assert line == "cannot write a (there is no process group); choose another --calibrate-dir"
