"""``forerun plan``: the best layouts by number of GPUs, of the run's kind or of others.

``--show`` and ``--write`` give a row of the plan as a runnable command.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ...calib.shell import printable
from ...calib.workload.choices import NAMED_CHOICES
from ..options.plan_options import PLAN_OPTIONS
from .arguments import ExitCode, add_schema, declare, print_json, print_notes
from .run_arguments import add_evidence, add_run, open_run, other_run, show_answer

if TYPE_CHECKING:
    from ..opened.row_command import RowCommand

_ROWS = """
--show N      print the whole launch command of row N (0: the running layout)
--write FILE  write the row as an executable script (default row 1)
"""
_STYLES = {"+": "green", "-": "red"}


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan``; most are text, so that errors state value and remedy."""
    add_run(sub)
    add_evidence(sub)
    add_schema(sub, "answers")
    declare(sub, "".join(option.declaration for option in PLAN_OPTIONS.values()))
    declare(sub, _ROWS, show={"type": int})
    names = ", ".join("/".join(axis.names) for axis in NAMED_CHOICES)
    sub.add_argument_group("layout", f"NAME of --keep and --why, as in NAME=VALUE|VALUE: {names}")


def run(args: argparse.Namespace) -> int:
    """Print the requested layouts, best first, or one of them as a command."""
    answer = open_run(args).plan(
        **question_options(args), **other_run(args), num_rows=args.show or 0
    )
    if args.show is None and args.write is None:
        show_answer(args, answer)
        return ExitCode.ANSWER
    print_notes(*answer.notes)
    row = answer.command(1 if args.show is None else args.show)
    if args.write is not None:
        row.write(args.write)
    if args.json:
        script = None if args.write is None else str(args.write)
        print_json({**row.to_json(), "script": script})
    else:
        _print(row)
        if args.write is not None:
            how = "sbatch " * ("\n#SBATCH" in row.script) + str(args.write)
            print_notes(f"{how} starts it; read it first")
    return ExitCode.ANSWER


def question_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the plan's options, by the parameter names of ``read_question`` and ``Run.plan``."""
    names = (option.parameter for option in PLAN_OPTIONS.values())
    return {name: getattr(args, name) for name in ("device", *names)}


def _print(row: RowCommand) -> None:
    """Print a row with its changes and diff; on a terminal, new words are highlighted."""
    from rich.text import Text

    from ..opened.row_command import BREAK
    from ..views.table import console

    out, line = console(), row.line
    print(row.title)
    text = Text()
    for place, (phrase, is_new) in enumerate(zip(line.phrases, line.is_new, strict=True)):
        text.append(BREAK if place else "")
        text.append(phrase.shell, style="bold green" if is_new else "")
    out.print(text, soft_wrap=True)
    for change in (*row.changes, *(f"# {printable(note)}" for note in row.notes)):
        out.print(Text(change, style="dim"), soft_wrap=True)
    for change in line.diff(f"row {row.row}"):
        out.print(Text(change, style=_STYLES.get(change[:1], "")), soft_wrap=True)
