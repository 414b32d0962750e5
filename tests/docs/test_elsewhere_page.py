"""Pages on other runs, machines and tables: each command answers, on what it asks for."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from forerun.launch.cli import ExitCode, main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "measured-elsewhere.md").read_text(encoding="utf-8")
CLUSTER = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
GOLDEN = ROOT / "tests" / "golden" / "cpu_dp2"
COMMANDS = re.findall(r"^forerun (.+)$", PAGE, flags=re.MULTILINE)
(IMPORT,) = (command for command in COMMANDS if command.startswith("import steps"))


@pytest.fixture(scope="module")
def stands_for(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands for the names of the page: a recorded run, an import, a cluster file."""
    home = tmp_path_factory.mktemp("elsewhere")
    (example,) = re.findall(r"^ {4}\{\n.*?^ {4}\}$", CLUSTER, flags=re.MULTILINE | re.DOTALL)
    nodes = home / "cluster.json"
    nodes.write_text(example)
    run, machine = str(shutil.copytree(GOLDEN, home / "run")), str(home / "machine")
    assert main([machine if word == "MACHINE" else word for word in shlex.split(IMPORT)]) == 0
    return {"DIR": run, "PROBED": run, "MACHINE": machine, "CLUSTER": str(nodes)}


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != IMPORT])
def test_a_command_answers(
    command: str, stands_for: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [stands_for.get(word, word) for word in shlex.split(command)]
    if "--gpus" in argv:  # 64 ranks would need a larger batch than the recorded run's 16 samples
        argv[argv.index("--gpus") + 1] = "4"
    assert main(argv) == ExitCode.ANSWER, capsys.readouterr().err


def test_every_verb_of_the_page_is_asked() -> None:
    assert {command.split()[0] for command in COMMANDS} == {
        "import", "predict", "plan", "validate",
    }  # fmt: skip
