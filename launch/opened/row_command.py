"""A row of a plan as a runnable command: ``forerun plan --show N --write FILE``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from ...calib.advice import Candidate, Plan
from ...calib.arguments import MEETING, Change, LaunchLine, launch_line, ranks_on_each
from ...calib.errors import ConfigError
from ...calib.fit import is_processor
from ...calib.forecast import WholeRun
from ...calib.memory import Verdict
from ...calib.records import Launch, replace_file, sealed, stamped
from ...calib.shell import printable, quoted
from ...calib.units import format_time
from ...calib.workload import RunConfig
from ..known import launch_of_command, launch_of_run
from ..wrapper import MARK, one_line, time_option
from .answer_types import PrintableAnswer
from .other_run import OtherRun

_MODE = 0o700
"""Owner only, because the script contains the run's arguments."""
BREAK = " \\\n    "
"""Separator between the phrases of a launch line."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RowCommand(PrintableAnswer):
    """A row of a plan with its launch line."""

    run_id: str
    row: int
    """Row number from 1; 0 is the running layout."""
    candidate: Candidate
    line: LaunchLine
    launch: Launch
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        """Row in one sentence, with the predicted step and its interval."""
        one = self.candidate
        return (
            f"row {self.row}, {one.label}: step {format_time(one.step_time_s)} (90 %: "
            f"{format_time(one.low_s)} to {format_time(one.high_s)})"
            + f", {one.against_text} against the running layout"
            * one.is_comparable
        )

    @property
    def changes(self) -> tuple[str, ...]:
        """Changed, added and removed options, as shell comments."""
        return tuple(map(_change_comment, self.line.changes))

    @property
    def text(self) -> str:
        """Launch line to paste into a shell."""
        return BREAK.join(phrase.shell for phrase in self.line.phrases)

    @property
    def script(self) -> str:
        """Script text: origin, changes, variables to set, and the launch."""
        comments = (f"{MARK} for run {self.run_id}", self.title, *self.changes, *self.notes)
        blanks = [f": {blank.text}" for blank in self.line.blanks]
        # By env, so that PATH or IFS apply to the program and not to this script.
        start = "exec env " if self.line.environment else "exec "
        body = [*blanks, *_go_to(self.launch), start + self.text]
        return "\n".join(["#!/bin/sh", *_comments(comments), "set -eu", *body]) + "\n"

    def write(self, path: Path | str) -> None:
        """Write the row atomically as an ``sh`` script, executable by its owner only.

        Raises ``ConfigError`` if it could not run, ``OSError`` if another file is in its place.
        """
        if self.candidate.verdict is Verdict.DOES_NOT_FIT or self.line.refused:
            why = "; ".join(self.line.refused) or "it does not fit in memory"
            raise ConfigError(f"row {self.row} cannot run ({why}); choose another with --show")
        write_script(path, self.script)

    def to_json(self) -> dict[str, Any]:
        """Return the value of ``forerun plan --show N --json``, without the name of a written
        file."""
        return stamped(
            {
                "run_id": self.run_id,
                "row": self.row,
                "candidate": self.candidate.to_json(),
                "launch": {**self.line.to_json(), "folder": self.launch.folder},
                "diff": self.line.diff(f"row {self.row}"),
                "notes": list(self.notes),
            }
        )

    def parts(self) -> Iterator[str]:
        """Yield the row, its launch line, and the differences from the running one."""
        head = (
            self.title,
            self.text,
            *self.changes,
            *(f"# {printable(note)}" for note in self.notes),
        )
        yield "\n".join([*head, *self.line.diff(f"row {self.row}")])


def row_command(directory: Path, run_id: str, plan: Plan, row: int, other: OtherRun) -> RowCommand:
    """Return a row with the launch line of the run, or of the command that describes another.

    Raises ``ConfigError`` if the plan has no such row.
    """
    rows = (plan.running, *plan.candidates)
    if not 0 <= row < len(rows):
        raise ConfigError(f"--show {row} is not a row; give one from 0 to {len(rows) - 1}")
    running, candidate = plan.running.config, rows[row]
    launch = launch_for(directory, run_id, running, other)
    line = launch_line(launch, running, candidate.config)
    return RowCommand(
        run_id=run_id,
        row=row,
        candidate=candidate,
        line=line,
        launch=launch,
        notes=(*_notes(candidate, plan), *line.refused, *line.notes),
    )


def launch_for(directory: Path, run_id: str, running: RunConfig, other: OtherRun) -> Launch:
    """Return the launch of the run, or of the one described in its place."""
    if other.command:
        return launch_of_command(other.command, running.parallelism)
    if other.config is not None:
        return Launch()
    return launch_of_run(directory, run_id, running.parallelism)


def write_script(path: Path | str, text: str) -> None:
    """Write a script, executable by its owner only; raise as ``replace_file`` does."""
    replace_file(Path(path), sealed(text.encode()), mode=_MODE)


def _comments(texts: Sequence[str]) -> Iterator[str]:
    return (f"# {one_line(text.removeprefix('# '))}" for text in texts)


def _go_to(launch: Launch) -> list[str]:
    return [f"cd -- {quoted(launch.folder)}"] if launch.folder else []


def _change_comment(one: Change) -> str:
    if one.before and one.after:
        return f"# changed: {one.after} (was {one.before})"
    return f"# added: {one.after}" if one.after else f"# removed: {one.before}"


def _notes(candidate: Candidate, plan: Plan) -> list[str]:
    notes = []
    if candidate.verdict is Verdict.DOES_NOT_FIT:
        notes.append("it does not fit in memory")
    if candidate is not plan.running and candidate.time_frac >= 0:
        notes.append("it is not faster than the running layout")
    if text := plan.conversion(candidate.config):
        notes.append(f"to go on from a checkpoint: {text}")
    return notes


_START_S = 1800.0
"""Allowance before the first step for containers, data, compilation and a checkpoint, seconds."""
_NOT_OF_A_NAME = re.compile(r"[^\w.-]")
_LENGTH = ("--train-iters", "--train-samples")
_RENDEZVOUS = (
    '--nnodes "$SLURM_JOB_NUM_NODES"',
    '--rdzv-id "$SLURM_JOB_ID"',
    "--rdzv-backend c10d",
    '--rdzv-endpoint "$SLURMD_NODENAME:29500"',
)
"""Rendezvous on the first node, with ``torchrun`` on each, as in ``recipes/slurm.sbatch``."""


def batch_script(
    layout: Candidate, run: WholeRun, launch: Launch, described: RunConfig, comments: Sequence[str]
) -> str:
    """Return the sbatch script; ``ConfigError`` if the layout cannot be launched, or the run's
    length is ambiguous."""
    config, par = layout.config, layout.config.parallelism
    line = launch_line(launch, described, config)
    each = ranks_on_each(launch, described.parallelism, par) or par.num_ranks
    each = min(each, par.num_ranks)
    why = "; ".join(line.refused) or "it does not fit in memory"
    if layout.verdict is Verdict.DOES_NOT_FIT or line.refused:
        raise ConfigError(f"--sbatch: {layout.label} cannot run ({why}); choose another layout")
    if par.num_ranks % each:
        raise ConfigError(f"--sbatch: {par.num_ranks} ranks fill no nodes of {each}; change --gpus")
    if (train_iters := config.cadence.train_iters) and train_iters != run.num_steps:
        raise ConfigError(
            f"--tokens asks for {run.num_steps:,} steps, and the line for {train_iters:,}; "
            "leave one out"
        )
    program = _NOT_OF_A_NAME.sub("_", PurePath(next(iter(launch.argv), "train")).stem)
    options = {"job-name": program, "nodes": par.num_ranks // each, "ntasks-per-node": 1}
    options |= {} if is_processor(config.device) else {"gpus-per-node": each}
    options["time"] = time_option(run.high_s + _START_S)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{name}={value}" for name, value in options.items()),
            *_comments((*comments, *run.lines)),
            f"# --time: the upper 95 % end of the run, and {_START_S / 60:.0f} minutes to start.",
            "set -eu",
            *_go_to(launch),
            _command(line, run.num_steps),
            "",
        ]
    )


def _command(line: LaunchLine, num_steps: int) -> str:
    """Return the launch under ``srun``, with its rendezvous options replaced by Slurm's."""
    start = [one for one in line.start if one.name not in {*MEETING, "--nnodes", "--standalone"}]
    place = next((n for n, one in enumerate(start) if one.name == "--nproc-per-node"), 0)
    if not place:
        raise ConfigError("--sbatch writes launches of torchrun; give the run's line with it")
    phrases = (*start, *line.program)
    blanks = dict.fromkeys(word.blank for one in phrases for word in one.words if word.blank)
    length = [] if any(one.name in _LENGTH for one in phrases) else [f"--train-iters {num_steps}"]
    words = [f"{name}={quoted(value)}" for name, value in line.environment.items()]
    shell = [one.shell for one in phrases]
    shell[place:place] = _RENDEZVOUS
    first = " ".join(["exec", *(["env", *words] if words else []), "srun --kill-on-bad-exit=1"])
    lines = [f": {blank.text}" for blank in blanks]
    return "\n".join([*lines, BREAK.join([first, *shell, *length])])
