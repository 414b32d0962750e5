"""The README tells the truth: its commands run, what it names is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from forerun.calib.workload.run_options import options
from forerun.launch.cli import ExitCode, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLUSTER = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"^ {4}\{\n.*?^ {4}\}$", CLUSTER, flags=re.MULTILINE | re.DOTALL)
GOLDEN = ROOT / "tests" / "golden" / "cpu_dp2"
ENDED = ROOT / "tests" / "golden" / "megatron_forecasts"
COMMANDS = re.findall(r"^    forerun (.+)$", README, flags=re.MULTILINE)
SOURCES = [
    path.read_text(encoding="utf-8")
    for room in ("hooks", "launch", "recipes")
    for path in (*(ROOT / room).rglob("*.py"), ROOT / "_forerun_autoload.py")
]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README imports to before it asks."""
    return tmp_path_factory.mktemp("machine")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_line_answers(
    command: str, machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_of_answers = command.split()[0] in ("compare", "status", "watch")
    home = ENDED if is_of_answers else GOLDEN
    nodes = machine.with_name("cluster.json")
    nodes.write_text(EXAMPLE)
    stands_for = {"DIR": str(home), "PROBED": str(home), "MACHINE": str(machine)}
    stands_for |= {"CLUSTER": str(nodes), "go.sh": str(machine.with_name("go.sh"))}
    if "MACHINE" in command and not [*machine.iterdir()]:
        (told,) = [one for one in COMMANDS if one.startswith("import steps")]
        assert main([stands_for.get(word, word) for word in shlex.split(told)]) == ExitCode.ANSWER
    argv = [stands_for.get(word, word) for word in shlex.split(command)]
    if "--gpus" in argv:  # 64 ranks would need a larger batch than the recorded run's 16 samples
        place = argv.index("--gpus") + 1
        argv[place] = "2..4" if ".." in argv[place] else "4"
    assert main(argv) == ExitCode.ANSWER, capsys.readouterr().err


def test_there_is_a_command_for_each_verb() -> None:
    told = {command.split()[0] for command in COMMANDS}
    assert told == {
        "report",
        "predict",
        "plan",
        "explain",
        "compare",
        "status",
        "watch",
        "doctor",
        "validate",
        "import",
    }


def test_the_wrapped_command_can_be_started(capfd: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"^    exec forerun (run .+)$", README, flags=re.MULTILINE)
    verb, *rest = shlex.split(command)
    assert main([verb, "--dry-run", *rest]) == ExitCode.ANSWER
    assert "calibrate directory: forerun-out" in capfd.readouterr().out


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    assert set(re.findall(r"^    make ([a-z-]+)", README, flags=re.MULTILINE)) <= targets


def test_every_flag_told_is_there() -> None:
    """Which flags there are, and what each means, is held in the reference."""
    there = {f"--calibrate-{flag.name}" for flag, _ in options()}
    told = set(re.findall(r"--calibrate-[a-z-]+[a-z]", README))
    assert told - {"--calibrate-on"} <= there  # that one is an option of validate


def test_every_environment_variable_told_is_read() -> None:
    for name in set(re.findall(r"FORERUN_[A-Z_]+", README)):
        assert any(f'"{name}"' in source for source in SOURCES), name


def test_every_number_was_filled_in() -> None:
    assert not re.findall(r"@[A-Z_]+@", README)
