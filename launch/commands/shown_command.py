"""``forerun plan --show N --write FILE``: a row of a plan as a command that runs."""

from __future__ import annotations

import argparse

from rich.text import Text

from ...calib.shell import shown
from ..opened.planned import PlanAnswer
from ..opened.row_command import BREAK, RowCommand
from ..report.table import console
from .outcome import ExitCode, print_json, tell


def show(args: argparse.Namespace, answer: PlanAnswer) -> int:
    """Print the row that is asked for, and write it where a file is named.

    Raises ``ConfigError`` for a row that the plan has not, and for a script that could not run.
    """
    found = answer.command(1 if args.show is None else args.show)
    if args.write is not None:
        found.write(args.write)
    if args.json:
        script = None if args.write is None else str(args.write)
        print_json({**found.to_json(), "script": script})
    else:
        _print(found)
        if args.write is not None:
            tell(f"{args.write} starts it; read it first")
    return ExitCode.ANSWER


def _print(found: RowCommand) -> None:
    """On a terminal what is new stands out; in any case it is listed, and so is the difference."""
    out, line = console(), found.line
    print(found.title)
    text = Text()
    for place, (phrase, is_new) in enumerate(zip(line.phrases, line.is_new, strict=True)):
        text.append(BREAK if place else "")
        text.append(phrase.shell, style="bold green" if is_new else "")
    out.print(text, soft_wrap=True)
    for told in (*found.changes, *(f"# {shown(note)}" for note in found.notes)):
        out.print(Text(told, style="dim"), soft_wrap=True)
    for told in line.diff(f"row {found.row}"):
        out.print(Text(told, style=_STYLES.get(told[:1], "")), soft_wrap=True)


_STYLES = {"+": "green", "-": "red"}
