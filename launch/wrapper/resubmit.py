"""Script to restart a run in the advised layout, for the user to start."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from ...calib.arguments.launchers import is_of_library
from ...calib.arguments.passed_on import unmask_arguments
from ...calib.records.files import replace_file, sealed
from ...calib.shell import assigned, is_variable, quoted
from ...hooks.process.launch_note import is_module
from ..batch_text import MARK, one_line
from ..options.flags import split
from .log_lines import log_line

_SUBMITTED = {
    **{"SLURM_JOB_NAME": "job-name", "SLURM_JOB_PARTITION": "partition"},
    **{"SLURM_JOB_ACCOUNT": "account", "SLURM_JOB_QOS": "qos", "SLURM_JOB_NUM_NODES": "nodes"},
    **{"SLURM_NTASKS_PER_NODE": "ntasks-per-node", "SLURM_GPUS_PER_NODE": "gpus-per-node"},
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
}
"""``sbatch`` options by the variables in which Slurm gives them to the job."""


def relaunch(command: Sequence[str], advised: Sequence[str]) -> tuple[str, ...]:
    """Return the launcher of ``command`` with program and arguments of ``advised``, and our flags.

    Values masked in ``advised`` are taken from ``command``.  Empty if the program or a masked value
    is not in ``command``, as when a shell script starts it.

    >>> ran = ["torchrun", "--nproc-per-node", "8", "train.py", "--lr", "1", "--calibrate"]
    >>> relaunch(ran, ["train.py", "--lr", "1", "--tensor-model-parallel-size", "4"])[3:6]
    ('train.py', '--lr', '1')
    """
    place = _program(command, advised[0]) if advised else None
    if place is None:
        return ()
    flag_split = split(list(command[place + 1 :]))
    restored_words = unmask_arguments(advised, (command[place], *flag_split.rest))
    return (*command[: place + 1], *restored_words[1:], *flag_split.flags) if restored_words else ()


def script(words: Sequence[str], reason: str, time: str, environ: Mapping[str, str]) -> str:
    """Return a script of one command, for any shell and for ``sbatch``.

    ``time`` is that of the next job, in the format of ``--time``; empty if unknown.  Raises
    ``OSError`` if the working directory is gone.
    """
    # sbatch hands a job's variables on, a shell of another day does not.
    libraries = {n: v for n, v in environ.items() if is_of_library(n) and is_variable(n, v)}
    variables = {} if environ.get("SLURM_JOB_ID") else libraries
    command = " env" * bool(variables)
    command += "".join(f" {assigned(*one)}" for one in sorted(variables.items()))
    # One option with its values per line.
    command += "".join(
        (" \\\n    " if word.startswith("--") else " ") + _of_next(word, environ) for word in words
    )
    lines = (
        "#!/bin/bash",
        *_submission(environ, time),
        f"{MARK}: {one_line(reason)}",
        "# Read it, then start it yourself. The layout has changed; where the number of ranks",
        "# has as well, so must the launcher's (--nproc-per-node, --nnodes).",
        "set -eu",
        f"cd -- {quoted(os.getcwd())}",
        f"exec{command}\n",
    )
    return "\n".join(lines)


def try_write_script(text: str, path: Path) -> bool:
    """Write a script unless another file is in its place; log the reason of a failure."""
    try:
        replace_file(path, sealed(text.encode()), mode=0o700)  # it contains arguments
    except OSError as err:
        log_line(f"{path}: {err.strerror or err}")
        return False
    return True


def _submission(environ: Mapping[str, str], time: str) -> list[str]:
    """Return ``#SBATCH`` lines that repeat this job's submission options."""
    if not environ.get("SLURM_JOB_ID"):
        return []
    options = {name: environ.get(key, "") for key, name in _SUBMITTED.items()} | {"time": time}
    lines = {name: _slurm_quoted(one_line(value)) for name, value in options.items() if value}
    lines["signal"] = "B:USR1@600"
    return [f"#SBATCH --{name}={value}" for name, value in lines.items()]


def _slurm_quoted(value: str) -> str:
    """Quote a value for an ``#SBATCH`` line: as in a shell, but a backslash always escapes."""
    if re.fullmatch(r"[A-Za-z0-9@%+=:,./_-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _program(command: Sequence[str], program: str) -> int | None:
    """Return the index of the training program in the launch line, by path, file name or module."""
    if program in command:
        return command.index(program)
    for index, word in enumerate(command):
        if index and command[index - 1] in ("-m", "--module"):
            if is_module(word, program):
                return index
        elif word.endswith(".py") and PurePath(word).name == PurePath(program).name:
            return index
    return None


def _of_next(word: str, environ: Mapping[str, str]) -> str:
    """Return a quoted word, with this job's id and node replaced by variables for the next
    job's."""
    host, _, port = word.partition(":")
    if word and word == environ.get("SLURM_JOB_ID"):
        return '"$SLURM_JOB_ID"'
    if host and host == environ.get("SLURMD_NODENAME") and port.isdecimal():
        return f'"$SLURMD_NODENAME:{port}"'
    return quoted(word)
