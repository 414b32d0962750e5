"""The shape of two planted trees: one as a directory, one as a revision of git."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from forerun.benchmarks.structure import moves, shape_of, table, tree_of

pytestmark = pytest.mark.slow

ORDER = "# Rooms\n\n```rooms\ncalib/low    first\ncalib/high   second\nlaunch/top   third\n```\n"
MOVED = "    return weight * 3 + offset\n"
UNMOVED = "TABLE_OF_OTHERS = (1, 2, 3)\n"
OLD = {
    "ARCHITECTURE.md": ORDER,
    "__init__.py": "",
    "calib/__init__.py": "",
    "calib/low/a.py": f"{UNMOVED}\n\ndef line(weight, offset):\n{MOVED}",
    "calib/low/b.py": "MeasuredAnswer = 1\n",
    "calib/high/c.py": "from ..low.a import line\nfrom ..low import a\n",
    "launch/top/__init__.py": "",
    "benchmarks/readers.py": "",
    "tests/test_other.py": "this file is not parsed: (",
}
NEW = {
    **OLD,
    "calib/low/a.py": "from dataclasses import dataclass\nfrom ..high import c\n",
    "calib/low/b.py": (
        f"HOME = 'forerun.launch.top'\n\n\ndef straight(weight, offset):\n{MOVED}\n\n"
        "@dataclass(frozen=True)\nclass Line:\n    def to_json(self):\n        return {}\n"
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
    assert result.num_moved == 1
    assert result.num_moved_out == {"benchmarks": 1, "recipes": 0, "tests": 0}
    assert result.num_gone == 2  # ``def line`` and the constant
    assert result.num_new == 9
    assert moves(NEW, NEW).num_new == 0


def test_kinds_and_arrows_are_counted() -> None:
    old, new = shape_of(OLD), shape_of(NEW)
    assert (old.num_modules, new.num_modules) == (6, 7)
    assert (old.num_dataclasses, new.num_dataclasses) == (0, 1)
    assert (old.num_to_json, new.num_to_json) == (0, 1)
    assert (old.num_counted_name, new.num_counted_name) == (1, 0)
    assert (old.num_imports_across, old.num_imports_within) == (1, 0)
    assert (new.num_imports_across, new.num_imports_within) == (2, 1)
    assert old.upward_imports == old.upward_names == ()
    assert new.upward_imports == ("calib.low.a -> calib.high.c",)
    assert new.upward_names == ("calib.low.b -> launch.top",)
    assert (old.num_circles, new.num_circles) == (0, 1)
    assert (new.num_functions, new.median_function, new.longest_function) == (2, 2, 2)


@pytest.mark.parametrize(
    "row",
    [
        "| modules | 6 | 7 | +1 |",
        "| lines that moved to another file |  |  | 1 |",
        "| imports that point up | 0 | 1 | +1 |",
        "| circles of imports | 0 | 1 | +1 |",
    ],
)
def test_the_table_says_both_trees_and_the_change(row: str) -> None:
    assert row in table(shape_of(OLD), shape_of(NEW), moves(OLD, NEW)).splitlines()


def test_where_no_order_is_declared_none_is_held() -> None:
    shape = shape_of({**NEW, "ARCHITECTURE.md": "# Rooms\n"})
    assert shape.upward_imports is None and shape.upward_names is None
    assert "| imports that point up | - | 1 | - |" in table(shape, shape_of(NEW), moves(NEW, NEW))
