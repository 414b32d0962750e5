"""The page on launches lists every rule as it is; run as a script, it is written anew."""

from __future__ import annotations

from pathlib import Path

from forerun.calib.lint.linter import RULES
from forerun.launch.cli import build_parser

PAGE = Path(__file__).parents[2] / "docs" / "lint.md"
_HEAD = "| rule | finds | harm | why | gain | by |\n|---|---|---|---|---|---|\n"


def table() -> str:
    rows = [
        f"| `{rule.name}` | {rule.when} | {rule.harm.value} | {rule.why} | "
        f"{rule.unpriced or 'by the model'} | {rule.source} |\n"
        for rule in RULES
    ]
    return _HEAD + "".join(rows)


def test_the_table_is_what_the_rules_say() -> None:
    assert PAGE.read_text("utf-8").endswith("\n\n" + table())


def test_every_option_is_told() -> None:
    choices = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    options = {option for action in choices["doctor"]._actions for option in action.option_strings}
    text = PAGE.read_text("utf-8")
    assert all(option in text for option in options - {"-h", "--help", "--run-id"})


if __name__ == "__main__":
    text = PAGE.read_text("utf-8").partition(_HEAD)[0]
    PAGE.write_text(f"{text.rstrip()}\n\n{table()}", encoding="utf-8")
