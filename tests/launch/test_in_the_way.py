"""``import torch`` is as it was, whatever became of the package, the directory or the process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from forerun import _forerun_autoload as entry
from forerun.launch.verbs.doctor import Severity, attachment

ROOT = Path(entry.__file__).parent
WORKER = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
TRAIN = "import sys, torch\nprint(torch.ones(2).sum().item(), sys.argv[1:])\n"
BUILD = "import sys; from setuptools import build_meta as b; print(b.build_editable(sys.argv[1]))"


def start(
    *command: str | Path, cwd: Path | None = None, code: int = 0, **environ: str
) -> subprocess.CompletedProcess[str]:
    excluded = ("FORERUN", "TORCHELASTIC", "TORCH_DEVICE", *WORKER)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(excluded)}
    done = subprocess.run(
        [sys.executable, *[str(word) for word in command]],
        cwd=cwd,
        env=inherited | environ,
        text=True,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-3000:]
    return done


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def test_the_installed_module_is_the_one_of_this_tree() -> None:
    # A build's leftovers in this folder are a distribution as well, but not an installed one.
    (distribution,) = [
        each
        for each in metadata.distributions(name="forerun")
        if Path(str(each.locate_file(""))).resolve() != ROOT
    ]
    installed = Path(str(distribution.locate_file("_forerun_autoload.py")))
    assert installed.is_file() and installed.parent != ROOT, "an editable one has a copy, too"
    same = installed.read_bytes() == Path(entry.__file__).read_bytes()
    assert same, "install this tree again: pip install -e ."


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["file", "folder", "package"])
def test_a_name_in_the_working_directory_costs_the_calibration_alone(
    tmp_path: Path, train: Path, shape: str
) -> None:
    if shape == "file":
        (tmp_path / "forerun.py").write_text("raise SystemExit('imported')\n")
    else:
        (tmp_path / "forerun").mkdir()
    if shape == "package":
        (tmp_path / "forerun" / "__init__.py").write_text("raise SystemExit('imported')\n")
    if shape == "package":  # the others are even less of one
        bare = start(train, "--lr", "1", cwd=tmp_path, **WORKER)
        assert (bare.stdout, bare.stderr) == ("2.0 ['--lr', '1']\n", "")
    done = start(train, "--lr", "1", "--calibrate", cwd=tmp_path, **WORKER)
    *_, message, printed = done.stdout.splitlines()
    assert "hides the package forerun; rename it; calibration is off" in message
    assert str(tmp_path) in message
    assert (printed, done.stderr) == ("2.0 ['--lr', '1']", "")
    (row,) = [f for f in attachment({}, (str(tmp_path),)) if f.name == "in the way"]
    assert row.verdict is Severity.WARN and row.value.startswith(str(tmp_path))


def site_without_us(folder: Path) -> str:
    """Code that makes ``folder`` the site packages, with links to all that are not ours."""
    folder.mkdir()
    for path in Path(torch.__file__).parent.parent.iterdir():
        if "forerun" not in path.name and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return f"import site, sys; sys.path = sys.path[1:]; site.addsitedir({str(folder)!r})"


@pytest.mark.slow
def test_a_clone_that_was_moved_leaves_torch_as_it_was(tmp_path: Path, train: Path) -> None:
    clone = tmp_path / "clone"
    ignored = shutil.ignore_patterns(".*", "tests", "benchmarks", "build", "*-out", "wandb")
    shutil.copytree(ROOT, clone, ignore=ignored)
    (wheel,) = start("-c", BUILD, tmp_path, cwd=clone).stdout.splitlines()[-1:]
    begin = site_without_us(tmp_path / "site")
    shutil.unpack_archive(tmp_path / wheel, tmp_path / "site", "zip")
    (information,) = (tmp_path / "site").glob("forerun-*.dist-info")
    origin = {"url": clone.as_uri(), "dir_info": {"editable": True}}  # as pip writes it
    (information / "direct_url.json").write_text(json.dumps(origin))
    code = f"{begin}; sys.argv = sys.argv[:1] + sys.argv[2:]; exec(open({str(train)!r}).read())"
    arguments = ("-I", "-S", "-c", code, "x", "--calibrate", "--calibrate-steps=2", "--lr", "1")
    before = start(*arguments, **WORKER)
    assert "[forerun] --calibrate-steps=2: must be a whole number from 4 on" in before.stdout
    shutil.move(clone, tmp_path / "moved")
    bare = start("-I", "-S", "-c", code, "x", "--lr", "1", **WORKER)
    assert bare.stdout == "2.0 ['--lr', '1']\n"
    after = start(*arguments, **WORKER)
    *_, message, printed = after.stdout.splitlines()
    assert "was its clone moved or deleted? pip install it again" in message
    assert printed == "2.0 ['--lr', '1']"
    doctor = (
        f"{begin}; sys.path.insert(0, {str(tmp_path / 'again')!r}); import json;"
        "from forerun.launch.verbs.doctor import attachment;"
        "print(json.dumps([[f.name, f.value, f.verdict.value] for f in attachment({}, ())]))"
    )
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "forerun").symlink_to(tmp_path / "moved")
    rows = json.loads(start("-I", "-S", "-c", doctor).stdout)
    assert ["clone", f"editable, but {clone} is gone", "missing"] in rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "expected_argv"),
    [
        ("sys.modules['forerun.hooks.process.settings'] = None", "['--lr']"),
        ("sys.modules['forerun'] = __import__('json')", "['--lr']"),
        ("del sys.argv", ""),
        ("sys.argv = [sys.argv[0], 5, None]", "[5, None]"),
        ("sys.stdout.close(); sys.stdout = None", "['--lr']"),
        ("sys.orig_argv = 3; sys.stdout = open('/dev/full', 'w')", "['--lr', '--calibrate']"),
    ],
)
def test_an_odd_process_imports_torch(tmp_path: Path, before: str, expected_argv: str) -> None:
    script = tmp_path / "odd.py"
    script.write_text(
        f"import sys\n{before}\nimport torch\n"
        "sys.stderr.write(f'{torch.__name__} {getattr(sys, \"argv\", [0])[1:]}')\n"
        "sys.stdout = None\n"
    )
    done = start(script, "--lr", "--calibrate", cwd=tmp_path, **WORKER)
    assert done.stderr.splitlines()[-1] == f"torch {expected_argv or []}"


@pytest.mark.slow
def test_another_programs_flags_are_left_and_one_line_says_what_to_write(train: Path) -> None:
    words = ("--calibrate", "--calibrate-momentum", "0.9", "--calibrate-token=hush")
    done = start(train, *words, **WORKER)
    message, printed = done.stdout.splitlines()
    assert message.startswith("[forerun] left to the program: --calibrate --calibrate-momentum ")
    assert "--forerun" in message and "FORERUN_OFF=1" in message and "hush" not in message
    assert printed == f"2.0 {list(words)}"


@pytest.mark.slow
def test_all_is_switched_off_at_once_and_our_own_name_is_taken_all_the_same(train: Path) -> None:
    off = {**WORKER, "FORERUN_OFF": "1", "FORERUN_CALIBRATE": "1", "FORERUN_DEVICE": "cpu"}
    assert start(train, "--calibrate", **off).stdout == "2.0 ['--calibrate']\n"
    named = start(train, "--forerun", "--forerun-steps=8", "--calibrate", **off)
    assert named.stdout == "2.0 ['--calibrate']\n"


def test_doctor_tells_what_is_exported_and_switched_off(tmp_path: Path) -> None:
    def remedies(**environ: str) -> dict[str, str]:
        rows = attachment(environ, (str(tmp_path),))
        return {row.value: row.remedy for row in rows if row.verdict is Severity.WARN}

    assert remedies() == {}
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in remedies(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "FORERUN_OFF=1" in remedies(FORERUN_OFF="1")
    assert "FORERUN_OWNER is exported" in remedies(FORERUN_OWNER="1:2")
