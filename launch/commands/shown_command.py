"""``forerun plan --show N --write FILE``: a row of a plan as a command that runs."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from ...calib.advice.converters import converter
from ...calib.advice.plan import Candidate, Plan
from ...calib.commands.launch_line import Change, LaunchLine, launch_line
from ...calib.errors import ConfigError
from ...calib.memory.peak import Verdict
from ...calib.records.files import replace_file
from ...calib.records.launch import Launch
from ...calib.units import format_frac, format_time
from ..known.launches import launch_of_command, launch_of_run
from ..report.table import console
from ..wrapper.log_lines import one_line
from ..wrapper.resubmit import MARK, is_ours, quoted, sealed
from .outcome import ExitCode, print_json, tell

_MODE = 0o700
"""It holds arguments."""
_BREAK = " \\\n    "


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """A row of a plan with its command."""

    run_id: str
    row: int
    """From 1; 0 is the running layout."""
    candidate: Candidate
    line: LaunchLine
    launch: Launch
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        """The row in one sentence, with the predicted step and its interval."""
        one = self.candidate
        return (
            f"row {self.row}, {one.label}: step {format_time(one.step_time_s)} (90 %: "
            f"{format_time(one.low_s)} to {format_time(one.high_s)}), "
            f"{format_frac(one.time_frac, signed=True)} against the running layout"
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "run_id": self.run_id,
            "row": self.row,
            "candidate": self.candidate.to_json(),
            "launch": {**self.line.to_json(), "folder": self.launch.folder},
            "diff": self.line.diff(f"row {self.row}"),
            "notes": list(self.notes),
        }


def show(args: argparse.Namespace, run_id: str, plan: Plan) -> int:
    """Print the row that is asked for, and write it where a file is named.

    Raises ``ConfigError`` for a row that the plan has not, and for a script that could not run.
    """
    found = shown_row(args, run_id, plan)
    if args.write is not None:
        write_script(found, args.write)
    if args.json:
        script = None if args.write is None else str(args.write)
        print_json({**found.to_json(), "script": script})
    else:
        _print(found)
        if args.write is not None:
            tell(f"{args.write} starts it; read it first")
    return ExitCode.ANSWER


def shown_row(args: argparse.Namespace, run_id: str, plan: Plan) -> ShownRow:
    """The row with the launch line of the run, or of the command behind ``--``."""
    row = 1 if args.show is None else args.show
    rows = (plan.own, *plan.candidates)
    if not 0 <= row < len(rows):
        raise ConfigError(f"--show {row} is no row; give one from 0 to {len(rows) - 1}")
    running, candidate = plan.own.config, rows[row]
    if args.command:
        launch = launch_of_command(args.command, running.parallelism)
    elif getattr(args, "config", None) is not None:
        launch = Launch()
    else:
        launch = launch_of_run(args.directory, run_id, running.parallelism)
    line = launch_line(launch, running, candidate.config)
    return ShownRow(
        run_id=run_id,
        row=row,
        candidate=candidate,
        line=line,
        launch=launch,
        notes=(*_notes(candidate, plan), *line.refused, *line.notes),
    )


def write_script(found: ShownRow, path: Path) -> None:
    """Write the row as an executable ``sh`` script at once, for its owner alone.

    Raises ``ConfigError`` where it could not run, and where another file is in its place.
    """
    if found.candidate.verdict is Verdict.DOES_NOT_FIT or found.line.refused:
        why = "; ".join(found.line.refused) or "it does not fit in memory"
        raise ConfigError(f"row {found.row} cannot run ({why}); choose another with --show")
    if os.path.lexists(path) and not is_ours(path):
        raise ConfigError(f"{path} is there and not of this program; give another --write")
    data = script_text(found).encode("utf-8", "surrogateescape")
    replace_file(path, sealed(data), mode=_MODE)


def script_text(found: ShownRow) -> str:
    """The script: where it comes from, what changed, what has to be set, and the launch."""
    line = found.line
    said = (f"{MARK} for run {found.run_id}", found.title, *_told(line.changes), *found.notes)
    comments = [f"# {one_line(text.removeprefix('# '))}" for text in said]
    blanks = [f': "{blank.text}"' for blank in line.blanks]
    folder = [f"cd -- {quoted(found.launch.folder)}"] if found.launch.folder else []
    variables = [f"export {name}={quoted(v)}" for name, v in sorted(line.environment.items())]
    words = [phrase.shell for phrase in (*line.start, *line.program)]
    body = ["set -eu", *blanks, *folder, *variables, "exec " + _BREAK.join(words)]
    return "\n".join(["#!/bin/sh", *comments, *body]) + "\n"


def _print(found: ShownRow) -> None:
    """On a terminal what is new stands out; in any case it is listed, and so is the difference."""
    out, line = console(), found.line
    print(found.title)
    text = Text()
    for place, (phrase, is_new) in enumerate(zip(line.phrases, line.is_new, strict=True)):
        text.append(_BREAK if place else "")
        text.append(phrase.shell, style="bold green" if is_new else "")
    out.print(text, soft_wrap=True)
    for told in (*_told(line.changes), *(f"# {note}" for note in found.notes)):
        out.print(Text(told, style="dim"), soft_wrap=True)
    for told in line.diff(f"row {found.row}"):
        out.print(Text(told, style=_STYLES.get(told[:1], "")), soft_wrap=True)


_STYLES = {"+": "green", "-": "red"}


def _told(changes: tuple[Change, ...]) -> list[str]:
    """One line for each change, as comments of a shell."""
    found = []
    for one in changes:
        if one.before and one.after:
            found.append(f"# changed: {one.after} (was {one.before})")
        else:
            found.append(f"# added: {one.after}" if one.after else f"# removed: {one.before}")
    return found


def _notes(candidate: Candidate, plan: Plan) -> list[str]:
    notes = []
    if candidate.verdict is Verdict.DOES_NOT_FIT:
        notes.append("it does not fit in memory")
    if candidate is not plan.own and candidate.time_frac >= 0:
        notes.append("it is not faster than the running layout")
    if text := converter(candidate.config, plan.own.config):
        notes.append(f"to go on from a checkpoint: {text}")
    return notes
