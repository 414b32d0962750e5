"""The page on two runs: every option is told."""

from __future__ import annotations

from pathlib import Path

from forerun.launch.cli import build_parser

PAGE = (Path(__file__).parents[2] / "docs" / "diff.md").read_text(encoding="utf-8")


def test_every_option_is_told() -> None:
    choices = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    options = {option for action in choices["diff"]._actions for option in action.option_strings}
    assert all(f"`{option}" in PAGE for option in options - {"-h", "--help"})
