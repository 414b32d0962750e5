"""What rank 0 notes of its launch, once and never in the thread that trains.

The words before the program are the parent's, which is torchrun's agent or accelerate's.  Files of
``/proc``, the environment and the program's source are read; nothing is sent, and only what may be
kept is written.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath

from ...calib.arguments.kept_arguments import kept_arguments, kept_command
from ...calib.arguments.megatron_rules import VARIABLES
from ...calib.records.files import PRIVATE, replace_file
from ...calib.records.launch import NAME, Launch
from .program_text import absent_of
from .settings import Settings

_MOST_NBYTES = 65_536
"""Of a command line: longer ones hold lists of files, and are not kept."""
_HOSTS = ("megatron.bridge",)
_KEPT = (*VARIABLES, "FORERUN_DEVICE")
"""Of the environment; a run on the stand-in device is launched on it again."""


class LaunchNote:
    """``poll`` writes it beside the records of rank 0, once their folder is there."""

    def __init__(self, settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
        self._settings = settings
        self._environ = environ
        self._is_due = settings.rank.rank == 0 and bool(settings.host_argv)

    def poll(self) -> None:
        """Write it where it is due and can be written."""
        folder = self._settings.directory / "records" / self._settings.rank.run_id
        if not self._is_due or not folder.is_dir():
            return
        self._is_due = False
        launch = launch_of(self._settings, self._environ, _parent_command(), sys.modules)
        text = json.dumps(launch.to_json())
        if len(text) <= _MOST_NBYTES:
            with suppress(OSError):  # where nothing can be written, the writer says so
                replace_file(folder / NAME, text + "\n", mode=PRIVATE)


def launch_of(
    settings: Settings,
    environ: Mapping[str, str],
    parent: Sequence[str],
    modules: Mapping[str, object],
) -> Launch:
    """The launch of this process; ``parent`` is the command line that started it."""
    rank = settings.rank
    each = max(1, rank.local_world_size)
    launcher, program = launcher_words(parent, settings.host_argv[0])
    if not launcher and rank.world_size == 1:
        launcher, program = launcher_words(sys.orig_argv, settings.host_argv[0])
    folder = ""
    with suppress(OSError):
        folder = str(Path.cwd())
    return Launch(
        argv=(*program, *kept_arguments(settings.host_argv)[1:]),
        launcher=launcher,
        folder=folder,
        host=next((name for name in _HOSTS if name in modules), ""),
        absent=absent_of(settings.host_argv[0], modules),
        num_nodes=max(1, rank.world_size // each),
        ranks_per_node=min(each, rank.world_size),
        environment={name: environ[name] for name in _KEPT if name in environ},
    )


def launcher_words(parent: Sequence[str], program: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words of a launcher, and those that name the program, masked.

    A module (``-m package.train``) is a path among the worker's own arguments.  Without a launcher
    where the program is not in its words, as under srun.

    >>> launcher_words(["python", "/bin/torchrun", "--nproc-per-node", "2", "t.py"], "t.py")
    (('python', '/bin/torchrun', '--nproc-per-node', '2'), ('t.py',))
    >>> launcher_words(["slurmstepd"], "t.py")
    ((), ('t.py',))
    """
    kept = kept_command(parent)
    # What comes before -- is forerun run with its own options.
    begin = parent.index("--") + 1 if "--" in parent else 0
    for place in range(begin, len(parent)):
        word, before = parent[place], parent[place - 1] if place else ""
        if before in ("-m", "--module") and _is_module(word, program):
            return kept[begin : place - 1], kept[place - 1 : place + 1]
        if place and PurePath(word).name == PurePath(program).name:
            return kept[begin:place], (kept[place],)
    return (), kept_arguments((program,))


def _is_module(name: str, program: str) -> bool:
    path = PurePath(*name.split("."))
    ends = (path.with_suffix(".py").parts, (path / "__main__.py").parts)
    return any(PurePath(program).parts[-len(end) :] == end for end in ends)


def _parent_command() -> tuple[str, ...]:
    try:
        data = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return ()
    if len(data) > _MOST_NBYTES:
        return ()
    return tuple(data.decode("utf-8", "replace").rstrip("\0").split("\0"))
