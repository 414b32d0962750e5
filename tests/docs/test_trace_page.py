"""The page on traces: its commands write files that Perfetto takes, and its tables are complete."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from trace_reader import read

from forerun.calib.fit.estimates import Source
from forerun.calib.steps.slices import WAITING
from forerun.launch.cli import main

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trace.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    forerun (.*?)(?:\s+#.*)?$", PAGE, re.MULTILINE)
PROCESSES = (
    {"predicted, asked", "predicted, running"},
    {"predicted, A", "predicted, B"},
    {"predicted, A"},
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two ranks."""
    return Path(shutil.copytree(ROOT / "tests" / "golden" / "cpu_dp2", tmp_path / "run"))


@pytest.mark.parametrize(("command", "processes"), [*zip(COMMANDS, PROCESSES, strict=True)])
def test_a_command_of_the_page_writes_a_trace(
    command: str, processes: set[str], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [{"DIR": str(run)}.get(word, word) for word in shlex.split(command)]
    assert main(words) == 0
    result = read(json.loads(gzip.decompress((tmp_path / words[-1]).read_bytes())))
    assert {one.process for one in result} == processes
    span_names = {one.event["name"] for one in result if one.depth}
    assert {"linear_fc1", "host"} <= span_names
    streams = {re.sub(r"stage \d+", "stage N", one.track) for one in result}
    assert streams >= {"step", "stage N passes"} and all(f"`{one}`" in PAGE for one in streams)
    categories = {one.event["cat"] for one in result if one.depth}
    assert all(f"`{category}`" in PAGE for category in categories)
    keys = {key for one in result if one.depth for key in one.event["args"]}
    assert {"calls", "phase", "source"} <= keys and all(f"`{key}`" in PAGE for key in keys)
    assert f"`{WAITING}`" in PAGE


def test_every_source_of_a_time_is_told() -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith("| `source`"))
    assert all(source.value in row for source in Source)


def test_without_room_the_error_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    there = tmp_path / "file" / "trace.json"
    assert main(["explain", str(run), "running", "--timeline", str(there)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) <= 2
