"""The page on Python: its blocks run in order, and its tables are the columns that there are."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from forerun.calib.samples.columns import FRAMES
from forerun.launch.opened._step_frame import COLUMNS

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_its_blocks_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "tests" / "golden" / "cpu_dp2", tmp_path / "forerun-out")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "docs/python.md", "exec"), names)
    out = capsys.readouterr().out
    assert len(BLOCKS) == 7 and "'tpp' is not an axis of a layout; did you mean tp?" in out


def first_column(heading: str) -> list[str]:
    """Names in the first column of the table below a heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def test_every_column_is_told() -> None:
    assert first_column("Steps") == list(COLUMNS)
    assert first_column("Samples") == list(FRAMES["samples"])
