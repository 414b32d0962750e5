"""The page on two runs: its commands are taken, and every option is told."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from forerun.launch.cli import build_parser
from forerun.launch.options.diff_options import asked_runs

PAGE = (Path(__file__).parents[2] / "docs" / "diff.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    forerun (diff .*?)(?:\s+#.*|\s+>.*)?$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_understood(command: str) -> None:
    first, second = asked_runs(build_parser().parse_args(shlex.split(command)))
    assert first != second


def test_every_option_is_told() -> None:
    assert len(COMMANDS) > 5
    choices = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    own = {option for action in choices["diff"]._actions for option in action.option_strings}
    assert all(f"`{option}" in PAGE for option in own - {"-h", "--help"})
