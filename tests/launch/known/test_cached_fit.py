"""A cached fit answers as the fit itself, and never when anything under it has changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
SLOW = ("pandas", "pyarrow", "scipy", "sklearn", "xgboost")
IDLE = (
    *("numpy.random", "rich.progress", "jinja2", "plotly", "jsonschema", "wandb"),
    *("importlib.metadata", "importlib.resources", "email", "tempfile", "subprocess"),
    *("forerun.hooks.control", "forerun.hooks.session", "forerun.launch.wrapper.slurm"),
    *(
        "forerun.calib.samples.table",
        "forerun.calib.arguments.launch_lines",
        "forerun.calib.answers.analysis",
    ),
)
"""Modules that no answer of a cached fit needs; each is slow to import."""
ASK = f"""
import json, sys
from forerun.launch.cli import main
code = main(sys.argv[1:])
loaded = [name for name in {IDLE!r} if name in sys.modules]
print(json.dumps([name for name in {SLOW!r} if name in sys.modules]), file=sys.stderr)
if loaded and not set({SLOW!r}) & set(sys.modules):
    sys.exit(f"needlessly imported: {{loaded}}")
sys.exit(code)
"""
PREDICT = ("--json", "--tensor-model-parallel-size", "2")


def ask(*argv: str) -> tuple[dict, bool]:
    """An answer of a process of its own, and whether it was fitted for it."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, *argv], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout), bool(json.loads(done.stderr.splitlines()[-1]))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A recorded run."""
    shutil.copytree(GOLDEN / "records", tmp_path / "run" / "records")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("shared") / "run"
    shutil.copytree(GOLDEN / "records", home / "records")
    return home


@pytest.fixture
def fitted(shared_home: Path) -> tuple[Path, dict]:
    """A run whose fit is cached, by the test before or by this one, and its answer."""
    for path in shared_home.glob("fit-*.npz"):
        if path.is_dir():
            path.rmdir()
    return shared_home, ask("predict", str(shared_home), *PREDICT)[0]


def newest(home: Path) -> Path:
    return max(home.glob("fit-*.npz"), key=os.path.getmtime)


def figures(value: object) -> list[float]:
    """Every number of an answer."""
    if isinstance(value, dict):
        return [result for item in value.values() for result in figures(item)]
    if isinstance(value, list):
        return [value for item in value for value in figures(item)]
    return [float(value)] if isinstance(value, (int, float)) else []


@pytest.mark.parametrize("verb", ["predict", "plan", "explain"])
def test_a_cached_fit_says_what_the_fit_says_and_imports_nothing_slow(
    home: Path, verb: str
) -> None:
    options = {"predict": PREDICT, "plan": ("--json",), "explain": ("--json", "1", "running")}[verb]
    first, was_fitted = ask(verb, str(home), *options)
    repeated, is_fitted = ask(verb, str(home), *options)
    assert was_fitted and not is_fitted
    assert {**repeated, "made_unix_s": 0} == {**first, "made_unix_s": 0}


def append_row(home: Path) -> None:
    path = next(home.glob("records/*/rank-*.jsonl"))
    last = path.read_text(encoding="utf-8").splitlines()[-1]
    with path.open("a", encoding="utf-8") as file:
        file.write(last + "\n")


def truncate_cache(home: Path) -> None:
    cached = newest(home)
    cached.write_bytes(cached.read_bytes()[:-100])


def flipped(home: Path) -> None:
    cached = newest(home)
    cached.write_bytes(cached.read_bytes().replace(b"time_s", b"time_x", 1))


def no_text(home: Path) -> None:
    cached = newest(home)
    cached.write_bytes(b"\x80\x04" + bytes(range(256)))


def replace_cache_with_folder(home: Path) -> None:
    cached = newest(home)
    cached.unlink()
    cached.mkdir()


@pytest.mark.parametrize(
    "change", [append_row, truncate_cache, flipped, no_text, replace_cache_with_folder]
)
def test_what_is_stale_or_damaged_is_fitted_anew_in_silence(
    fitted: tuple[Path, dict], change: Callable[[Path], None]
) -> None:
    home, first = fitted
    change(home)
    repeated, is_fitted = ask("predict", str(home), *PREDICT)
    assert is_fitted
    assert repeated["step_time_s"] == pytest.approx(first["step_time_s"], rel=1e-3)


def test_what_others_may_write_is_not_read(fitted: tuple[Path, dict]) -> None:
    home, _ = fitted
    cached = newest(home)
    assert cached.stat().st_mode & 0o077 == 0
    cached.chmod(0o666)
    assert ask("predict", str(home), *PREDICT)[1]


def test_a_file_of_that_name_that_is_not_ours_stays(home: Path) -> None:
    mine = home / "fit-model.npz"
    mine.write_text("{}", encoding="utf-8")
    for name in range(12):
        (home / f"fit-{name:016x}.npz").write_text("mine", encoding="utf-8")
    ask("predict", str(home), *PREDICT)
    assert len(list(home.glob("fit-*.npz"))) == 1 + 12 + 1


def test_another_directory_of_evidence_is_another_question(
    fitted: tuple[Path, dict], tmp_path: Path
) -> None:
    home, _ = fitted
    other = tmp_path / "other"
    shutil.copytree(home / "records", other / "records")
    also = (*PREDICT, "--also", str(other))
    assert ask("predict", str(home), *also)[1]
    assert not ask("predict", str(home), *also)[1]
    append_row(other)
    assert ask("predict", str(home), *also)[1]
    assert not ask("predict", str(home), *PREDICT)[1]
