"""The page on plans: every name and option is told."""

from __future__ import annotations

import re
from pathlib import Path

from forerun.calib.workload.choices import NAMED_CHOICES
from forerun.launch.cli import build_parser

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


def test_every_name_of_a_layout_is_told() -> None:
    rows = {re.sub("`", "", row.split("|")[1]).strip() for row in PAGE.splitlines() if "|" in row}
    documented = {name.strip() for row in rows for name in row.split(",")}
    assert documented >= {name for axis in NAMED_CHOICES for name in axis.names}


def test_every_option_of_plan_alone_is_told() -> None:
    choices = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    plan_options, report = (
        {option for action in choices[verb]._actions for option in action.option_strings}
        for verb in ("plan", "predict")
    )
    assert plan_options - report and all(f"`{option}" in PAGE for option in plan_options - report)
