"""``collect.py`` on a CPU in virtual time, and what ``judge.py`` makes of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from zipfile import ZipFile

import pytest

from forerun.benchmarks.gpu import collect
from forerun.benchmarks.gpu.judge import BARS, UNSEEN, page, read, value_of

SCRIPT = Path(collect.__file__)


def collected(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--cpu", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_each_part_ends_in_time():
    for part in (1, 2, 3):
        limits_s = [each.limit_s for each in collect.MEASUREMENTS if each.part == part]
        assert 0 < sum(limits_s) <= collect.PART_S


def test_each_bar_is_of_a_measurement():
    names = {each.name for each in collect.MEASUREMENTS}
    assert {bar.measurement for bar in BARS} == names - {"preflight"}


@pytest.mark.slow
def test_streams_are_told_apart_and_the_page_says_so(tmp_path):
    done = collected(tmp_path / "out", "--only", "streams", "fsdp", "trace")
    assert done.returncode == 0, done.stderr
    archive = tmp_path / "out.tar.gz"
    with tarfile.open(archive) as packed:
        assert max(name.count("/") for name in packed.getnames()) <= 2
    text, is_met = page(dict(read(archive)))
    assert not is_met  # what was not measured is not met
    rows = [row for row in text.splitlines() if row.startswith(("| streams | ", "| fsdp | all"))]
    assert len(rows) == 9 and sum(row.endswith("| met |") for row in rows) == 8
    assert "| recipe | not run |" in text
    traced = dict(read(archive))["trace"]
    # A busy machine adds a second one: the share of kernels' time without an operator.
    assert traced["figures"]["remarks"][0] == "trace"
    assert (value_of(traced, "num_traced") or 0) > 50
    assert "A rehearsal on a CPU" in text and text.rstrip().endswith(UNSEEN)


@pytest.mark.slow
def test_what_takes_too_long_ends_with_all_that_it_started(tmp_path):
    late = tmp_path / "late"
    child = f"import time, pathlib; time.sleep(9); pathlib.Path({str(late)!r}).touch()"
    code = (
        "import subprocess, sys, time; print('begun', flush=True);"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True);"
        "time.sleep(60)"
    )
    begun_s = time.monotonic()
    environ = os.environ | {"GPU_REPORT_RUN": tmp_path.name}
    ended, output = collect.finished([sys.executable, "-c", code], environ, 5.0)
    assert (ended, output.strip()) == (None, "begun")
    assert time.monotonic() - begun_s < 8.0
    time.sleep(8.0)
    assert not late.exists()


def test_without_an_installation_the_flags_are_there_all_the_same(tmp_path, monkeypatch):
    """``import torch`` needs to find an entry point beside the package."""
    monkeypatch.setattr(collect, "_is_installed", lambda: False)
    wheel = tmp_path / "wheels" / "carried-1-py3-none-any.whl"
    wheel.parent.mkdir()
    with ZipFile(wheel, "w") as packed:
        packed.writestr("carried.py", "VALUE = 7\n")
    environ = collect.environment(tmp_path, wheel.parent)
    path = environ["PYTHONPATH"].split(os.pathsep)[0]
    (distribution,) = importlib.metadata.distributions(path=[path], name="forerun")
    entries = [(e.group, e.value) for e in distribution.entry_points if e.group == "torch.backends"]
    assert entries == [("torch.backends", "_forerun_autoload:load")]
    code = (
        "import carried, forerun, _forerun_autoload, forerun.benchmarks.gpu.collect as collect;"
        "print(carried.VALUE, collect.__file__)"
    )
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
    assert done.stdout.split() == ["7", f"{path}/forerun/benchmarks/gpu/collect.py"]


def test_figures_that_follow_from_others():
    trace = {"figures": {"begin_free_mib": [9000, 8800], "end_free_mib": [8000, 8900]}}
    assert value_of(trace, "taken_mib") == 1000
    ended = {"asked": ["refused: CUDA error"], "problem": "", "is_equal": True}
    capture = {"figures": {"ours_global": ended}}
    assert value_of(capture, "ours_global.num_problems") == 1
    assert value_of(capture, "ours_global.is_equal") == 1
    assert value_of({}, "ours_global.is_equal") is None


def test_the_later_of_two_archives_counts(tmp_path):
    for name, value in (("a", 1), ("b", 0)):
        out = tmp_path / name
        out.mkdir()
        result = {"state": "done", "figures": {"num_other_losses": value}, "wall_s": 1.0}
        (out / "recipe.json").write_text(json.dumps(result))
        (out / "other.json").write_text("{}")
    script = SCRIPT.with_name("judge.py")
    places = [str(tmp_path / name) for name in ("a", "b")]
    command = [sys.executable, str(script), *places, "--out", str(tmp_path / "page.md")]
    assert subprocess.run(command, check=False).returncode == 1
    assert (
        "| losses that hooks have changed | 0 | at most 0 | met |"
        in (tmp_path / "page.md").read_text()
    )
