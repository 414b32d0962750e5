"""Imports of each verb: quick answers load nothing that only fitting needs."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "cpu_dp2"
ENDED = Path(__file__).parents[1] / "golden" / "megatron_forecasts"
FITTING = ("sklearn", "xgboost", "scipy.stats", "joblib")
TABLES = ("pandas", "pyarrow", "scipy")
DRAWING = ("rich", "jinja2", "plotly")
EVERY = ("torch", "wandb")
COUNT = f"""
import json, sys
from forerun.launch.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
names = {(*FITTING, *TABLES, *DRAWING, *EVERY, "numpy")!r}
print(json.dumps([code, [name for name in names if name in sys.modules]]), file=sys.stderr)
"""


def loaded(*words: str) -> set[str]:
    """Return those of the packages above that a verb imports in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *words], capture_output=True, text=True, check=True
    )
    code, names = json.loads(done.stderr.splitlines()[-1])
    assert code in (0, 1, None), done.stderr
    return set(names)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run whose own question is known, and what it was asked before."""
    home = tmp_path_factory.mktemp("asked") / "run"
    shutil.copytree(GOLDEN / "records", home / "records")
    (run_id,) = [path.name for path in (home / "records").iterdir()]
    request = {"schema": 1, "run_id": run_id, "now_unix_s": 1.8e9}
    (home / "request.json").write_text(json.dumps(request))
    return home


@pytest.mark.parametrize("words", [f"status {ENDED}", f"status {ENDED} --watch"])
def test_the_standard_library_is_enough(words: str) -> None:
    assert not loaded(*words.split())


@pytest.mark.parametrize("words", ["report --help", "doctor"])
def test_nothing_slow_is_needed_to_be_told_what_there_is(words: str) -> None:
    assert loaded(*words.split()) <= {"numpy"}


@pytest.mark.parametrize("words", ["predict --tp 2", "plan", "explain 1 running"])
def test_an_answer_of_a_cached_fit_needs_numpy_alone(home: Path, words: str) -> None:
    verb, *rest = words.split()
    loaded(verb, str(home), *rest)
    assert loaded(verb, str(home), *rest) <= {"numpy", "rich"}


def test_a_report_is_cached_until_a_file_changes(home: Path) -> None:
    def report(*words: str) -> str:
        command = [sys.executable, "-m", "forerun", "report", str(home), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    first = report()
    assert not set(FITTING) & loaded("report", str(home))
    assert not loaded("report", str(home))
    assert report() == first and "\x1b" not in first
    for path in home.glob("report-*.json"):
        path.write_bytes(path.read_bytes()[:-10])
    assert report() == first
    value = json.loads(report("--json"))
    assert json.loads(report("--json")) == value
    request = json.loads((home / "request.json").read_text())
    (home / "request.json").write_text(json.dumps({**request, "now_unix_s": 1.9e9}))
    assert "pandas" in loaded("report", str(home))


def test_a_report_on_records_alone_is_cached_too(tmp_path: Path) -> None:
    home = tmp_path / "run"
    shutil.copytree(GOLDEN / "records", home / "records")
    assert "pandas" in loaded("report", str(home))
    assert "pandas" not in loaded("report", str(home)) and [*home.glob("report-*")]


def test_no_colour_where_none_is_wanted(home: Path) -> None:
    command = [sys.executable, "-m", "forerun", "report", str(home)]
    environ = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    done = subprocess.run(command, capture_output=True, check=True, env=environ)
    assert b"\x1b" not in done.stdout + done.stderr
    ours, theirs = pty.openpty()
    plain = {**os.environ, "NO_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "120"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=plain):
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # the other side is closed
            pass
    os.close(ours)
    assert b"Layouts" in shown
    assert not re.search(rb"\x1b\[(\d+;)*[349]\dm", shown)


def test_a_report_is_cached_for_its_width(home: Path) -> None:
    """Without a terminal it is as wide as its tables need; 80 columns may be asked for then."""
    command = [sys.executable, "-m", "forerun", "report", str(home)]
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}

    def width(**more: str) -> int:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environ | more
        )
        header = done.stdout.partition("\nLayouts\n")[2].partition("\n")[0]
        return len(header)

    assert width() > 80 >= width(COLUMNS="80")
    assert width() > 80
