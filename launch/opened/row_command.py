"""A row of a plan as a runnable command: ``forerun plan --show N --write FILE``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ...calib.advice.planning import Candidate, Plan
from ...calib.arguments.launch_lines import Change, LaunchLine, launch_line
from ...calib.arguments.launch_words import MEETING, Phrase, Word, ranks_on_each
from ...calib.arguments.launchers import ranks_of
from ...calib.errors import ConfigError
from ...calib.fit.priors import is_processor
from ...calib.forecast.whole import WholeRun
from ...calib.memory.peak import Verdict
from ...calib.records.files import replace_file, sealed
from ...calib.records.iso_times import stamped
from ...calib.records.run_values import Launch
from ...calib.shell import exported, joined, printable, quoted
from ...calib.units import format_time
from ...calib.workload.config import RunConfig
from ..batch_text import MARK, one_line, time_option
from ..known.machine import launch_of_command, launch_of_run
from ._answer_types import PrintableAnswer
from .other_run import OtherRun

if TYPE_CHECKING:
    from ..options.launch_scripts import LaunchScript

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
    described: RunConfig
    """Layout that the launch starts."""
    notes: tuple[str, ...]
    user_script: LaunchScript | None = None
    """The user's script around the launch."""

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
        """Script text: origin, changes, variables to set, and the launch; or the user's script with
        the launch in its place.  Raises ``ConfigError`` if that would not start it."""
        comments = (f"{MARK} for run {self.run_id}", self.title, *self.changes, *self.notes)
        counts = _counts(self.line, self.launch, self.described, self.candidate.config)
        return _script(self.line, self.launch, self.user_script, comments, counts)

    def write(self, path: Path | str) -> None:
        """Write the row atomically as an ``sh`` script, executable by its owner only.

        Raises ``ConfigError`` if it could not run, ``OSError`` if another file is in its place.
        """
        if self.candidate.verdict is Verdict.DOES_NOT_FIT or self.line.refused:
            why = "; ".join(self.line.refused) or "it does not fit in memory"
            raise ConfigError(
                f"row {self.row} cannot run ({why}); mend that or choose another with --show"
            )
        write_script(path, self.script, self.user_script)

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


def row_command(
    directory: Path, run_id: str, plan: Plan, row: int, other: OtherRun, running: RunConfig
) -> RowCommand:
    """Return a row with the launch line of the run, or of the command that describes another, whose
    layout is ``running``.

    Raises ``ConfigError`` if the plan has no such row.
    """
    rows = plan.rows
    if row not in rows:
        raise ConfigError(
            f"--show {row} is not a row; give one from {min(rows, default=0)} to "
            f"{max(rows, default=0)}"
        )
    candidate = rows[row]
    launch = launch_for(directory, run_id, running, other)
    line = _line(launch, running, candidate.config, other.script)
    return RowCommand(
        described=running,
        user_script=other.script,
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


def write_script(path: Path | str, text: str, user_script: LaunchScript | None = None) -> None:
    """Write a script, executable by its owner only; raise as ``replace_file`` does.

    Raises ``ConfigError`` if it looks for files beside itself, and ``path`` is elsewhere.
    """
    if user_script is not None and re.search(r"BASH_SOURCE|\$\{?0\b", text):
        folder = Path(user_script.name).absolute().parent
        if Path(path).absolute().parent != folder:
            raise ConfigError(f"{user_script.name} reads files beside itself; write into {folder}")
    replace_file(Path(path), sealed(text.encode()), mode=_MODE)


def _line(
    launch: Launch, running: RunConfig, config: RunConfig, user_script: LaunchScript | None
) -> LaunchLine:
    """Return the launch line of a layout; in a user's script, with its variables left to it."""
    line = launch_line(launch, running, config)
    if user_script is None:
        return line
    words = [word for phrase in (*line.start, *line.program) for word in phrase.words]
    refusal = user_script.refusal(words)
    line = line.mapped(user_script.in_shell)
    note = f"in place of the launch in {user_script.name}, whose other lines --write keeps"
    return replace(
        line,
        # The script sets the others itself.
        environment={name: value for name, value in line.environment.items() if "$" not in value},
        refused=(*line.refused, *((refusal,) if refusal else ())),
        notes=(*line.notes, note),
    )


def _script(
    line: LaunchLine,
    launch: Launch,
    user_script: LaunchScript | None,
    comments: Sequence[str],
    counts: Mapping[str, int],
    options: Mapping[str, object] | None = None,
) -> str:
    """Return a script of one launch, which takes further arguments of the program.

    ``options`` are those of sbatch, None without it.
    """
    # By env, so that PATH or IFS apply to the program and not to this script.
    command = "env " * bool(line.environment) + BREAK.join(one.shell for one in line.phrases)
    if user_script is None:
        blanks = [f": {blank.text}" for blank in line.blanks]
        head, directives = ["#!/bin/sh" if options is None else "#!/bin/bash"], []
        body = ["set -eu", *blanks, *_go_to(launch), f'exec {command} "$@"', ""]
    else:
        given = user_script.arguments
        words = [word.text for one in (*line.start, *line.program) for word in one.words]
        # The program gets what is behind the script's own arguments.
        rest = f'"${{@:{len(given) + 1}}}"' if given else '"$@"'
        text = user_script.with_launch(f"{command} {rest}", words)
        body = text.split("\n")
        head = [body.pop(0) if text.startswith("#!") else "#!/bin/bash"]
        end = 1 + max((n for n, one in enumerate(body) if one.startswith("#SBATCH")), default=-1)
        directives, body = body[:end], body[end:]
        if user_script.options:
            directives.append(f"#SBATCH {joined(user_script.options)}")
        body[:0] = [exported(*one) for one in user_script.exported.items()]
        body[:0] = [f'set -- {joined(given)} "$@"'] if given else []
    if directives or options is not None:
        directives = _directives(directives, counts, options or {})
    return "\n".join([*head, *directives, *_comments(comments), *body])


def _counts(
    line: LaunchLine, launch: Launch, described: RunConfig, config: RunConfig
) -> dict[str, int]:
    """Return the numbers of a job's nodes, tasks and GPUs by options of sbatch."""
    par = config.parallelism
    each = ranks_on_each(launch, described.parallelism, par) or par.num_ranks
    each = min(each, par.num_ranks)
    starter = ranks_of([word.text for one in line.start for word in one.words]).launcher
    tasks = each if starter in ("srun", "mpirun") else 1
    nodes = par.num_ranks // each
    return {
        "nodes": nodes,
        "ntasks": nodes * tasks,
        "ntasks-per-node": tasks,
        "gpus": par.num_ranks,
        "gpus-per-node": each,
        "gpus-per-task": each // tasks,
    }


def _directives(
    lines: Sequence[str], counts: Mapping[str, int], options: Mapping[str, object]
) -> list[str]:
    """Return the user's ``#SBATCH`` lines with the layout's numbers, and lines of those that are
    missing."""
    text = "\n".join(lines)
    for name, count in counts.items():
        form = rf"(?m)(^#SBATCH(?:.*\s)?(?:{_SPELLED.get(name, '--' + name)})"
        form += r"(?:=|[^\S\n]*)(?:[A-Za-z_]\w*:)*)\d[\d-]*(?=[\s,]|$)"
        text = re.sub(form, rf"\g<1>{count}", text)
    needed = {name: counts[name] for name in ("nodes", "ntasks-per-node")} | {**options}
    # Tasks and GPUs may be stated in several ways.
    others = {"ntasks-per-node": "|--ntasks|-n", "gpus-per-node": "|--gpus|-G|--gpus-per-task"}
    missing = [
        f"#SBATCH --{name}={value}"
        for name, value in needed.items()
        if not re.search(
            rf"(?m)^#SBATCH(?:.*\s)?(?:{_SPELLED.get(name, '--' + name)}{others.get(name, '')})"
            r"(?:[=\s\da-z]|$)",
            text,
        )
    ]
    return [*filter(None, [text]), *missing]


_SPELLED = {
    **{"nodes": "--nodes|-N", "ntasks": "--ntasks|-n", "gpus": "--gpus|-G", "time": "--time|-t"},
    **{"job-name": "--job-name|-J", "cpus-per-task": "--cpus-per-task|-c"},
    "gpus-per-node": r"--gpus-per-node|--gres[= ](?:\S*,)?(?=gpu)",
}
"""Options of sbatch with several spellings."""


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
    if candidate.conversion:
        notes.append(f"it does not resume the run: {candidate.conversion}")
    return notes


_START_S = 1800.0
"""Allowance before the first step for containers, data, compilation and a checkpoint, seconds."""
_NOT_OF_A_NAME = re.compile(r"[^\w.-]")
_LENGTH = ("--train-iters", "--train-samples")
_CPUS_PER_RANK = 8
_RENDEZVOUS = (
    ("--nnodes", "$SLURM_JOB_NUM_NODES"),
    ("--rdzv-id", "$SLURM_JOB_ID"),
    ("--rdzv-backend", "c10d"),
    ("--rdzv-endpoint", "$SLURMD_NODENAME:29500"),
)
"""Rendezvous on the first node, with ``torchrun`` on each, as in ``recipes/slurm.sbatch``."""
_CPUS = ("--cpus-per-task", "-c")


def batch_script(
    layout: Candidate,
    run: WholeRun,
    launch: Launch,
    described: RunConfig,
    comments: Sequence[str],
    user_script: LaunchScript | None = None,
) -> str:
    """Return the sbatch script; ``ConfigError`` if the layout cannot be launched, or the run's
    length is ambiguous."""
    config, par = layout.config, layout.config.parallelism
    line = _by_slurm(_line(launch, described, config, user_script), user_script, run.num_steps)
    why = "; ".join(line.refused) or "it does not fit in memory"
    if layout.verdict is Verdict.DOES_NOT_FIT or line.refused:
        raise ConfigError(
            f"--sbatch: {layout.label} cannot run ({why}); mend that or choose another layout"
        )
    counts = _counts(line, launch, described, config)
    each = counts["gpus-per-node"]
    if par.num_ranks % each:
        raise ConfigError(f"--sbatch: {par.num_ranks} ranks fill no nodes of {each}; change --gpus")
    if (train_iters := config.cadence.train_iters) and train_iters != run.num_steps:
        raise ConfigError(
            f"--tokens asks for {run.num_steps:,} steps, and the line for {train_iters:,}; "
            "leave one out"
        )
    time = time_option(run.high_s + _START_S)
    cpus = (
        f"{_CPUS_PER_RANK * each // counts['ntasks-per-node']}  # {_CPUS_PER_RANK} a rank assumed"
    )
    program = _NOT_OF_A_NAME.sub("_", PurePath(next(iter(launch.argv), "train")).stem)
    options = {"job-name": program, "cpus-per-task": cpus, "time": time}
    options |= {} if is_processor(config.device) else {"gpus-per-node": each}
    start = f"The run needs --time={time}: its upper 95 % end, {_START_S / 60:.0f} minutes to start"
    texts = (*comments, *run.lines, start)
    return _script(line, launch, user_script, texts, counts, options)


def _by_slurm(line: LaunchLine, user_script: LaunchScript | None, num_steps: int) -> LaunchLine:
    """Return the line under ``srun``, with Slurm's rendezvous unless the user's script has both,
    and the length of the run."""
    names = [word.text for one in line.start for word in one.words]
    starter, is_by_srun = (
        ranks_of(names).launcher,
        "srun" in [PurePath(name).name for name in names],
    )
    if starter not in ("torchrun", "srun"):
        raise ConfigError(
            f"--sbatch writes launches of torchrun or srun, not of {starter or 'others'}; "
            "give the run's line with one of them"
        )
    start = list(line.start)
    if starter == "torchrun" and not (user_script and is_by_srun):
        start = [one for one in start if one.name not in {*MEETING, "--nnodes", "--standalone"}]
        names = [one.name for one in start]
        place = names.index("--nproc-per-node") if "--nproc-per-node" in names else len(names)
        start[place:place] = [_option(*one) for one in _RENDEZVOUS]
    if not is_by_srun:
        start[:0] = [_option("srun"), _option("--kill-on-bad-exit=1")]
    place = next(n for n, one in enumerate(start) if "srun" in one.shell.replace("/", " ").split())
    if not any(one.name in _CPUS for one in start):
        start.insert(place + 1, _option("--cpus-per-task=$SLURM_CPUS_PER_TASK"))
    has_length = any(one.name in _LENGTH for one in line.phrases)
    length = () if has_length else (_option("--train-iters", str(num_steps)),)
    return replace(line, start=tuple(start), program=(*line.program, *length))


def _option(*texts: str) -> Phrase:
    """Return words of which a shell replaces the variables."""
    return Phrase(words=tuple(Word(text=text, is_open="$" in text) for text in texts))
