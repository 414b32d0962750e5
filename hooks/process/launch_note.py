"""Description of the launch, which rank 0 writes once, outside the training thread.

The words before the program are the parent's, which is torchrun's agent or accelerate's.  Files of
``/proc`` and the environment are read; nothing is sent, and secrets are masked.  Options of layouts
that the program lacks are read from what it parsed: Megatron-LM's own namespace, or ``args`` of the
main module.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath

from ...calib.arguments.megatron_rules import VARIABLES
from ...calib.arguments.passed_on import masked_arguments, masked_command
from ...calib.arguments.taken_options import TRANSFORMER_ENGINE, absent_options, options_in
from ...calib.records.files import CREATED, PRIVATE, replace_file
from ...calib.records.run_values import NAME, Launch
from .inspection import contents
from .settings import Settings

_MOST_NBYTES = 65_536
"""Limit on a command line: longer ones are lists of files, and are not recorded."""
_HOSTS = ("megatron.bridge",)
_RECORDED_VARIABLES = (*VARIABLES, "FORERUN_DEVICE")
"""Recorded environment variables; a run on the stand-in device is relaunched on it."""


class LaunchNote:
    """Launch description in rank 0's records; ``poll`` writes it once their folder exists."""

    def __init__(self, settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
        self._settings = settings
        self._environ = environ
        self._is_due = settings.rank.rank == 0 and bool(settings.host_argv)

    def poll(self) -> None:
        """Write it if it is due and can be written."""
        folder = self._settings.directory / "records" / self._settings.rank.run_id
        if not self._is_due or not folder.is_dir():
            return
        self._is_due = False
        launch = launch_of(self._settings, self._environ, _parent_command(), sys.modules)
        text = json.dumps({**CREATED, **launch.to_json()})
        if len(text) <= _MOST_NBYTES:
            with suppress(OSError):  # the writer reports an unwritable folder
                replace_file(folder / NAME, text + "\n", mode=PRIVATE)


def launch_of(
    settings: Settings,
    environ: Mapping[str, str],
    parent: Sequence[str],
    modules: Mapping[str, object],
) -> Launch:
    """Return the launch of this process; ``parent`` is the command line that started it."""
    rank = settings.rank
    each = max(1, rank.local_world_size)
    launcher, program = launcher_words(parent, settings.host_argv[0])
    if not launcher and rank.world_size == 1:
        launcher, program = launcher_words(sys.orig_argv, settings.host_argv[0])
    folder = ""
    with suppress(OSError):
        folder = str(Path.cwd())
    return Launch(
        argv=(*program, *masked_arguments(settings.host_argv)[1:]),
        launcher=launcher,
        folder=folder,
        host=next((name for name in _HOSTS if name in modules), ""),
        absent=absent_features(modules),
        num_nodes=max(1, rank.world_size // each),
        ranks_per_node=min(each, rank.world_size),
        environment={name: environ[name] for name in _RECORDED_VARIABLES if name in environ},
    )


def launcher_words(parent: Sequence[str], program: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words of a launcher, and those that name the program, masked.

    A module (``-m package.train``) is a path among the process's own arguments.  The launcher is
    empty if the program is not in its words, as under srun.

    >>> launcher_words(["python", "/bin/torchrun", "--nproc-per-node", "2", "t.py"], "t.py")
    (('python', '/bin/torchrun', '--nproc-per-node', '2'), ('t.py',))
    >>> launcher_words(["slurmstepd"], "t.py")
    ((), ('t.py',))
    """
    masked_words = masked_command(parent)
    # The words before -- are forerun run and its options.
    begin = parent.index("--") + 1 if "--" in parent else 0
    for place in range(begin, len(parent)):
        word, before = parent[place], parent[place - 1] if place else ""
        if before in ("-m", "--module") and is_module(word, program):
            return masked_words[begin : place - 1], masked_words[place - 1 : place + 1]
        if place and PurePath(word).name == PurePath(program).name:
            return masked_words[begin:place], (masked_words[place],)
    return (), masked_arguments((program,))


def is_module(name: str, program: str) -> bool:
    """Return True if a module of that name, or the package of it, is run from the file
    ``program``."""
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


def absent_features(modules: Mapping[str, object]) -> tuple[str, ...]:
    """Return options of layouts that a program on Megatron Core does not accept, and
    ``transformer_engine`` if it was not imported; unknown options are omitted."""
    if "megatron.core" not in modules:
        return ()
    engine = () if TRANSFORMER_ENGINE in modules else (TRANSFORMER_ENGINE,)
    taken = frozenset[str]() if "megatron.bridge" in modules else options_in(_parsed_names(modules))
    return (*(absent_options(taken) if taken else ()), *engine)


def _parsed_names(modules: Mapping[str, object]) -> frozenset[str]:
    """Return the names of parsed arguments; none if they are not known."""
    args = contents(modules.get("megatron.training.global_vars")).get("_GLOBAL_ARGS")
    args = contents(modules.get("__main__")).get("args") if args is None else args
    return frozenset(contents(args))
