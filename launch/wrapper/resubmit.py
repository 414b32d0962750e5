"""A script that starts a run again in the advised layout; it is the user who starts it.

It is made from a template of the user's own, which is read and never written, or from none.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from ...calib.arguments.kept_arguments import restored
from ...calib.errors import ConfigError
from ...calib.records.files import replace_file
from ...calib.shell import quoted
from ..directory.bounded_files import read_bounded
from ..options.flags import split
from .log_lines import one_line

MARK = "# Written by forerun"
_SEAL = "# As it was written: "
"""The last line: a digest of all before it, so that what a user has edited is not replaced."""
_MODE = 0o700
"""It holds arguments."""

_PLACE = re.compile(r"(?<!\$)\{(command|time|reason|directory|launch_id)\}")
"""Not ``${time}``, which is the script's own; other braces stay as they are."""
# Slurm itself takes no script above 4 MiB; real ones have some kilobytes.
_MOST_BYTES = 2**20
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


def read_template(path: Path) -> str:
    """Raises ``OSError`` where it cannot be read, ``ConfigError`` where it is no template."""
    path.stat()
    data = read_bounded(path.resolve(), _MOST_BYTES)
    if data is None:
        raise ConfigError("not a readable regular file below 1 MiB; give a script")
    text = data.decode("utf-8", "surrogateescape")
    if "command" not in _PLACE.findall(text):
        raise ConfigError("{command} is not in it; write it where the launch command belongs")
    return text


def filled(template: str, values: Mapping[str, str]) -> list[str]:
    """Lines of a template with each place filled; those whose place has no value are left out.

    >>> filled(
    ...     "#SBATCH --time={time}\\nexec {command} ${command}\\n",
    ...     {"command": "forerun run -- true", "time": ""},
    ... )
    ['exec forerun run -- true ${command}']
    """
    return [
        _PLACE.sub(lambda match: values[match[1]], line)
        for line in template.splitlines()
        if all(values[name] for name in _PLACE.findall(line))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What is to be started again, and how: for any shell and ``sbatch`` alike."""

    again: tuple[str, ...]
    """The launch, without us."""
    wrapper: tuple[str, ...]
    """Our own words, which stand before it."""
    reason: str
    time: str
    """Of the next job, as ``--time`` takes it; empty: not known."""
    launch_id: str
    directory: Path
    template: str = ""

    def write(self, path: Path, environ: Mapping[str, str]) -> None:
        """Write it; raises ``OSError``, ``FileExistsError`` for a file that we did not write."""
        if os.path.lexists(path) and not is_ours(path):
            raise FileExistsError(None, "not written by forerun, so it stays as it is", str(path))
        data = self.text(environ).encode("utf-8", "surrogateescape")
        replace_file(path, sealed(data), mode=_MODE)

    def text(self, environ: Mapping[str, str]) -> str:
        """The script; raises ``OSError`` where the working directory is gone."""
        mark = f"{MARK}: {one_line(self.reason)}"
        words = _options([*self.wrapper, "--", *self.again], environ)
        if self.template:
            values = {
                "command": " ".join(words),
                "time": self.time,
                "reason": quoted(one_line(self.reason)),
                "directory": quoted(str(self.directory)),
                "launch_id": quoted(self.launch_id),
            }
            first, *rest = filled(self.template, values) or [""]
            lines = [first, mark, *rest] if first.startswith("#!") else [mark, first, *rest]
            return "\n".join(lines) + "\n"
        lines = [
            "#!/bin/bash",
            *_submission(environ, self.time),
            mark,
            "# Read it, then start it yourself. The layout has changed; where the number of ranks",
            "# has as well, so must the launcher's (--nproc-per-node, --nnodes).",
            "set -eu",
            f"cd -- {quoted(os.getcwd())}",
            "exec " + " \\\n    ".join(words),
        ]
        return "\n".join(lines) + "\n"


def is_ours(path: Path) -> bool:
    """True for a regular file that we wrote and that nobody has changed since."""
    data = read_bounded(path) or b""
    text, seal, _ = data.rpartition(_SEAL.encode())
    return bool(seal) and MARK.encode() in text and data == text + _seal(text)


def sealed(data: bytes) -> bytes:
    """A script with its last line, by which ``is_ours`` knows it."""
    return data + _seal(data)


def _seal(data: bytes) -> bytes:
    return f"{_SEAL}{hashlib.sha256(data).hexdigest()[:16]}\n".encode()


def _submission(environ: Mapping[str, str], time: str) -> list[str]:
    """Lines for ``sbatch``: what this job says of its own submission."""
    if not environ.get("SLURM_JOB_ID"):
        return []
    kept = {name: environ[key] for key, name in _KEPT.items() if environ.get(key)}
    if time:
        kept["time"] = time
    lines = [f"#SBATCH --{name}={_slurm_quoted(one_line(value))}" for name, value in kept.items()]
    return [*lines, "#SBATCH --signal=B:USR1@600"]


def _slurm_quoted(value: str) -> str:
    """As ``sbatch`` reads its lines: quotes as in a shell, and a backslash counts everywhere."""
    if re.fullmatch(r"[A-Za-z0-9@%+=:,./_-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


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
        text = quoted(word)
        host, colon, port = word.partition(":")
        if job_id and word == job_id:
            text = '"$SLURM_JOB_ID"'
        elif node and host == node and port.isdecimal():
            text = '"$SLURMD_NODENAME' + colon + port + '"'
        if lines and not word.startswith("--"):
            lines[-1] += " " + text
        else:
            lines.append(text)
    return lines
