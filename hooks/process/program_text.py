"""What the program of this process lacks of what layouts ask for: by its parser, or by its text.

Where Megatron-LM parsed the arguments, its namespace tells.  A parser of one's own is gone once it
has been asked, so that the source of the script and of the modules that it imported is read; not
that of installed packages.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...calib.arguments.taken_options import (
    TRANSFORMER_ENGINE,
    absent_of_trainer,
    absent_options,
    options_in,
    options_named,
)

_MOST_NBYTES = 4 << 20
"""Of all sources together: beyond, nothing is said of the options."""
_NOT_THEIRS = frozenset({"forerun", "_forerun_autoload", "megatron", "torch"})
"""Packages that may lie beside a script and are not its own."""
_INSTALLED = ("site-packages", "dist-packages")


def absent_of(program: str, modules: Mapping[str, object]) -> tuple[str, ...]:
    """Options of layouts that the program does not take, and ``transformer_engine`` where it was
    not imported; options are left out where nothing tells of them.

    Of hosts other than Megatron's that is known of a program on transformers alone.
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
    """Names in Megatron-LM's namespace; None where it parsed nothing."""
    args = _values(modules.get("megatron.training.global_vars")).get("_GLOBAL_ARGS")
    return None if args is None else frozenset(_values(args))


def _texts(program: str, modules: Mapping[str, object]) -> list[str]:
    """The sources of the program; none where they are too long to be read.

    One by one: a search in a text lets no other thread run.
    """
    found: list[str] = []
    left = _MOST_NBYTES
    for path in sorted(_sources(program, modules)):
        try:
            if not path.is_file():
                continue
            left -= path.stat().st_size
            if left < 0:
                return []
            found.append(path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError):  # moved since it was imported, or not ours to read
            continue
    return found


def _sources(program: str, modules: Mapping[str, object]) -> Iterator[Path]:
    library = sysconfig.get_path("stdlib")
    files = {program}
    for name, module in tuple(modules.items()):
        file = _values(module).get("__file__")
        if isinstance(file, str) and name.partition(".")[0] not in _NOT_THEIRS:
            files.add(file)
    for file in files:
        is_installed = file.startswith(library) or any(part in file for part in _INSTALLED)
        if file.endswith(".py") and not is_installed:
            yield Path(file)


def _values(held: object) -> Mapping[str, object]:
    """The attributes that are there; asking otherwise would load a module that is lazy."""
    try:
        found = object.__getattribute__(held, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}
