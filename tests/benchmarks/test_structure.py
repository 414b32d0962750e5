"""The shape of two planted trees: one as a directory, one as a revision of git."""

from __future__ import annotations

import subprocess
from pathlib import Path

from forerun.benchmarks.structure import moves, shape_of, table, tree_of

MOVED = "    return weight * 3 + offset\n"
UNMOVED = "TABLE_OF_OTHERS = (1, 2, 3)\n"
OLD = {
    "__init__.py": "",
    "calib/__init__.py": "",
    "calib/low/a.py": f"{UNMOVED}\n\ndef line(weight, offset):\n{MOVED}",
    "calib/low/b.py": "FIXED = 1\n",
    "calib/high/c.py": "from ..low.a import line\n",
    "benchmarks/readers.py": "",
    "tests/test_other.py": "this file is not parsed: (",
}
NEW = {
    **OLD,
    "calib/low/a.py": "from dataclasses import dataclass\nfrom ..high import c\n",
    "calib/low/b.py": (
        f"HOME = 1\n\n\ndef straight(weight, offset):\n{MOVED}\n\n"
        "@dataclass(frozen=True)\nclass Line:\n    width: int\n"
    ),
    "calib/high/d.py": "from . import c\n",
    "benchmarks/readers.py": UNMOVED,
}


def write_files(files: dict[str, str], home: Path) -> Path:
    for path, text in files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    return home


def test_a_directory_and_a_revision_are_read_alike(tmp_path: Path) -> None:
    home = write_files({**OLD, "docs/page.md": "", "setup.py": ""}, tmp_path)
    git = ["git", "-C", str(home), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Plant"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    write_files(NEW, home)
    assert tree_of(str(home)) == NEW
    assert tree_of("HEAD", home) == OLD


def test_a_line_is_followed_into_another_file_and_out_of_the_package() -> None:
    result = moves(OLD, NEW)
    assert result["lines that moved to another file"] == 1
    assert result["lines that left for benchmarks"] == 1
    assert result["lines that are gone"] == 2  # ``def line`` and one constant
    assert result["lines that are new"] == 8
    assert moves(NEW, NEW)["lines that are new"] == 0


def test_kinds_and_arrows_are_counted() -> None:
    old, new = shape_of(OLD), shape_of(NEW)
    assert (old["modules"], new["modules"]) == (5, 6)
    assert (old["lines of benchmarks"], new["lines of benchmarks"]) == (0, 1)
    assert (old["dataclasses"], new["dataclasses"]) == (0, 1)
    assert (old["imports across rooms"], old["imports within rooms"]) == (1, 0)
    assert (new["imports across rooms"], new["imports within rooms"]) == (2, 1)
    assert (new["functions"], new["lines of a function, median"]) == (1, 2)
    rows = table(OLD, NEW).splitlines()
    assert "| modules | 5 | 6 | +1 |" in rows
    assert "| lines that moved to another file |  |  | 1 |" in rows
