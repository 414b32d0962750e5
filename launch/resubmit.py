"""A script that starts a run again in the advised layout; it is the user who starts it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from ..calib.samples.files import replace_file
from ..calib.workload.kept_arguments import restored
from .flags import split

_KEPT = {
    "SLURM_JOB_NAME": "job-name",
    "SLURM_JOB_PARTITION": "partition",
    "SLURM_JOB_ACCOUNT": "account",
    "SLURM_JOB_QOS": "qos",
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
}
"""What the job says of its own submission."""
_OWNERS = 0o700
"""The script holds the user's arguments as they are."""


def relaunch(command: Sequence[str], advised: Sequence[str]) -> tuple[str, ...]:
    """The launcher of ``command`` with the program and arguments of ``advised``, and our flags.

    Values that ``advised`` masks are those of ``command``.  Empty where the program or a masked
    value is not in ``command``, as when a shell script starts it.

    >>> ran = ["torchrun", "--nproc-per-node", "8", "train.py", "--lr", "1", "--calibrate"]
    >>> relaunch(ran, ["train.py", "--lr", "1", "--tensor-model-parallel-size", "4"])[3:6]
    ('train.py', '--lr', '1')
    """
    place = _program(command, advised[0]) if advised else None
    if place is None:
        return ()
    asked = split(list(command[place + 1 :]))
    again = restored(advised, (command[place], *asked.rest))
    return (*command[: place + 1], *again[1:], *asked.own) if again else ()


def write_script(
    path: Path,
    again: Sequence[str],
    *,
    wrapper: Sequence[str],
    reason: str,
    time: str,
    environ: Mapping[str, str],
) -> None:
    """Write the script, for ``bash`` and ``sbatch`` alike; raises ``OSError``."""
    lines = ["#!/bin/bash"]
    if environ.get("SLURM_JOB_ID"):
        kept = {name: environ[key] for key, name in _KEPT.items() if environ.get(key)}
        if time:
            kept["time"] = time
        lines += [f"#SBATCH --{name}={value}" for name, value in kept.items()]
        lines.append("#SBATCH --signal=B:USR1@600")
    lines += [
        f"# Written by forerun: {_one_line(reason)}",
        "# Read it, then start it yourself. The layout has changed; where the number of ranks has",
        "# as well, so must the launcher's (--nproc-per-node, --nnodes).",
        "set -eu",
        f"cd {shlex.quote(os.getcwd())}",
        "exec " + " \\\n    ".join(_options([*wrapper, "--", *again], environ)),
    ]
    replace_file(path, "\n".join(lines) + "\n", mode=_OWNERS)


def _program(command: Sequence[str], program: str) -> int | None:
    """Where in the launch line the training program stands, by path, file name or module."""
    if program in command:
        return command.index(program)
    path = PurePath(program)
    for index, word in enumerate(command):
        if index and command[index - 1] in ("-m", "--module"):
            module = PurePath(*word.split("."))
            names = (module.with_suffix(".py"), module / "__main__.py")
            if any(path.parts[-len(n.parts) :] == n.parts for n in names):
                return index
        elif word.endswith(".py") and PurePath(word).name == path.name:
            return index
    return None


def _options(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Quoted words, one option with its values to a line; what was this job's is the next one's."""
    job_id, node = environ.get("SLURM_JOB_ID"), environ.get("SLURMD_NODENAME")
    lines: list[str] = []
    for word in command:
        quoted = shlex.quote(word)
        host, colon, port = word.partition(":")
        if job_id and word == job_id:
            quoted = '"$SLURM_JOB_ID"'
        elif node and host == node and port.isdecimal():
            quoted = '"$SLURMD_NODENAME' + colon + port + '"'
        if lines and not word.startswith("--"):
            lines[-1] += " " + quoted
        else:
            lines.append(quoted)
    return lines


def _one_line(text: str) -> str:
    return " ".join(text.split())
