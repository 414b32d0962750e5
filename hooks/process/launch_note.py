"""Description of the launch, which rank 0 writes once, outside the training thread.

The words before the program are the parent's, which is torchrun's agent or accelerate's.  Files of
``/proc``, the environment and the program's source are read; nothing is sent, and secrets are
masked.  Options of layouts that the program lacks are read from Megatron-LM's own namespace if
it parsed the arguments; a user's own parser is gone by then, so the source of the script and of
the modules that it imported is searched, without installed packages.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath

from ...calib.arguments import (
    TRANSFORMER_ENGINE,
    VARIABLES,
    absent_of_trainer,
    absent_options,
    masked_arguments,
    masked_command,
    options_in,
    options_named,
)
from ...calib.records import CREATED, NAME, PRIVATE, Launch, replace_file
from .inspection import contents
from .settings import Settings

_MOST_NBYTES = 65_536
"""Limit on a command line: longer ones are lists of files, and are not recorded."""
_MOST_TEXT_NBYTES = 4 << 20
"""Limit on all sources together; beyond it, absent options are unknown."""
_NOT_THEIRS = frozenset({"forerun", "_forerun_autoload", "megatron", "torch"})
"""Packages that may lie next to a script but do not belong to it."""
_INSTALLED = ("site-packages", "dist-packages")
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
        absent=absent_features(settings.host_argv[0], modules),
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


def absent_features(program: str, modules: Mapping[str, object]) -> tuple[str, ...]:
    """Return options of layouts that the program does not accept, and ``transformer_engine`` if it
    was not imported; unknown options are omitted.

    Hosts other than Megatron's are only covered if the program uses transformers alone.
    """
    if "megatron.core" not in modules:
        is_trained = "transformers.trainer" in modules
        return absent_of_trainer(*_texts(program, modules)) if is_trained else ()
    engine = () if TRANSFORMER_ENGINE in modules else (TRANSFORMER_ENGINE,)
    if "megatron.bridge" in modules:
        return engine
    names = _megatron_names(modules)
    taken = options_named(*_texts(program, modules)) if names is None else options_in(names)
    return (*(() if taken is None else absent_options(taken)), *engine)


def _megatron_names(modules: Mapping[str, object]) -> frozenset[str] | None:
    """Return the names in Megatron-LM's namespace; None if it parsed nothing."""
    args = contents(modules.get("megatron.training.global_vars")).get("_GLOBAL_ARGS")
    return None if args is None else frozenset(contents(args))


def _texts(program: str, modules: Mapping[str, object]) -> list[str]:
    """Return the sources of the program; none if they are too long.

    They stay separate, since a search in a text blocks all other threads.
    """
    texts: list[str] = []
    remaining_nbytes = _MOST_TEXT_NBYTES
    for path in sorted(_sources(program, modules)):
        try:
            if not path.is_file():
                continue
            remaining_nbytes -= path.stat().st_size
            if remaining_nbytes < 0:
                return []
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError):  # moved since the import, or unreadable
            continue
    return texts


def _sources(program: str, modules: Mapping[str, object]) -> Iterator[Path]:
    library = sysconfig.get_path("stdlib")
    files = {program}
    for name, module in tuple(modules.items()):
        file = contents(module).get("__file__")
        if isinstance(file, str) and name.partition(".")[0] not in _NOT_THEIRS:
            files.add(file)
    for file in files:
        is_installed = file.startswith(library) or any(part in file for part in _INSTALLED)
        if file.endswith(".py") and not is_installed:
            yield Path(file)
