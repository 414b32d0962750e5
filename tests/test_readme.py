"""The README tells the truth: its commands run, what it names is there, and it stays short."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from forerun.calib.workload.run_options import options
from forerun.launch.cli import ExitCode, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GOLDEN = ROOT / "tests" / "golden" / "cpu_dp2"
ENDED = ROOT / "tests" / "golden" / "megatron_forecasts"
COMMANDS = re.findall(r"`forerun ([a-z]+ DIR[^`]*)`", README)
TERMINAL = (ROOT / "docs" / "pictures" / "terminal.svg").read_text(encoding="utf-8")
SOURCES = [
    path.read_text(encoding="utf-8")
    for folder in ("hooks", "launch", "recipes")
    for path in (*(ROOT / folder).rglob("*.py"), ROOT / "_forerun_autoload.py")
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Stand-ins for the directories of the README: copies of a run, one with forecasts."""
    home = tmp_path_factory.mktemp("readme")
    names = ("DIR", "DIR_A", "DIR_B")
    copies = {name: str(shutil.copytree(GOLDEN, home / name)) for name in names}
    shutil.copy(ENDED / "forecasts.jsonl", copies["DIR"])
    return copies


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_answers(
    command: str, runs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [runs.get(word, word) for word in shlex.split(command)]
    if "--gpus" in argv:  # 64 ranks would need a larger batch than the recorded run's 16 samples
        argv[argv.index("--gpus") + 1] = "4"
    assert main(argv) == ExitCode.ANSWER, capsys.readouterr().err


def test_each_of_the_five_questions_has_its_command() -> None:
    questions = re.findall(r"^\| ([^|]+\?) \| .*`forerun ", README, flags=re.MULTILINE)
    front = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert len(questions) == 5 and len(COMMANDS) == 6
    assert {command.split()[0] for command in COMMANDS} == {
        "status", "plan", "report", "explain", "diff",
    }  # fmt: skip
    assert all(f"`forerun {command}`" in front for command in COMMANDS)


def test_it_is_read_in_a_minute() -> None:
    lines = README.splitlines()
    assert len(lines) <= 90
    first_screen = "\n".join(lines[:30])
    claims = ("Seen on CPUs", "gloo", "x86-64", "one H200", "not yet on several GPUs")
    assert [words for words in claims if words not in first_screen] == []


def test_its_links_and_pictures_are_there() -> None:
    linked = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", README)
    inside = [name for name in linked if "://" not in name]
    assert len(inside) > 15
    assert [name for name in inside if not (ROOT / name).is_file()] == []
    pictures = [name for name in inside if name.endswith((".svg", ".png"))]
    assert len(pictures) == 3
    assert all((ROOT / name).stat().st_size < 60_000 for name in pictures)


def test_the_lines_that_are_explained_are_those_of_the_picture() -> None:
    explained = re.findall(
        r"^\| `((?:GPT|ends|faster|decision|checked|scored)[^`]+)` \|", README, re.MULTILINE
    )
    rows = re.findall(r'<text class="a\d+" [^>]*>([^<]*)</text>', TERMINAL)
    played = re.sub(r"\s+", "", "".join(rows))
    assert 5 <= len(explained) <= 8
    assert [line for line in explained if re.sub(r"\s+", "", line) not in played] == []


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    documented = set(re.findall(r"^    make ([a-z-]+)", README, flags=re.MULTILINE))
    assert documented == {"quickstart", "test"} <= targets


def test_every_flag_told_is_there() -> None:
    """Which flags there are, and what each means, is held in the reference."""
    there = {f"--calibrate-{flag.name}" for flag, _ in options()}
    assert set(re.findall(r"--calibrate-[a-z-]+[a-z]", README)) <= there


def test_every_environment_variable_told_is_read() -> None:
    for name in set(re.findall(r"FORERUN_[A-Z_]+", README + TERMINAL)):
        assert any(f'"{name}"' in source for source in SOURCES), name


def test_every_number_was_filled_in() -> None:
    assert not re.findall(r"@[A-Z_]+@", README)
