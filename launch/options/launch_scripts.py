"""The launch line inside a shell or batch script: read, never run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from ...calib.arguments import commands, of_options, split_launcher, split_variables
from ...calib.errors import ConfigError

_SHELLS = ("bash", "sh", "dash", "zsh", "ksh")
_BATCH = ("sbatch", "qsub", "salloc")
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_REDIRECTED = re.compile(r"^\d*(?:>>?|<)(?:&\d*)?")
_SIZES = ("--num-layers", "--hidden-size")
_MOST_DEEP = 4
_MOST_NBYTES = 1 << 20


def line_inside(words: Sequence[str]) -> tuple[str, ...]:
    """The launch line that ``bash run.sh``, ``sbatch run.sh`` or ``srun bash -c TEXT`` comes to.

    Other lines are returned as they are.  Raises ``ConfigError`` where a script cannot be read, or
    holds no training script that its text alone leads to.
    """
    for _ in range(_MOST_DEEP):
        place = _wrapper(words)
        if place is None:
            break
        words = _inside(words, place)
    return tuple(words)


def _wrapper(words: Sequence[str]) -> int | None:
    """Place of a shell, of a batch command or of a script, in front of any training script."""
    launcher, arguments = split_launcher(words)
    is_script = bool(launcher) or len(arguments) < len(words)
    front = launcher if is_script else words
    names = (*_SHELLS, *_BATCH)
    places = (n for n, w in enumerate(front) if PurePath(w).name in names or w.endswith(_SCRIPTS))
    return next(places, None)


def _inside(words: Sequence[str], place: int) -> tuple[str, ...]:
    outer, rest = words[:place], words[place:]
    variables, _ = split_variables(outer)
    is_batch = PurePath(rest[0]).name in _BATCH
    if PurePath(rest[0]).name in _SHELLS and (text := _said(rest[1:])) is not None:
        return (*outer, *_launch(commands(text, variables), f"{rest[0]} -c"))
    behind = rest if rest[0].endswith(_SCRIPTS) else rest[1:]
    word = next((one for one in behind if os.path.isfile(one)), None)
    if word is None:
        shown = " ".join(rest[:3])
        raise ConfigError(f"{shown}: no script that can be read; give the launch line itself")
    if is_batch:
        variables = {**of_options(rest[1 : rest.index(word)]), **variables}
    given = behind[behind.index(word) + 1 :]
    variables |= {"#": str(len(given)), **{str(n): one for n, one in enumerate(given, 1)}}
    path = Path(word)
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_NBYTES).decode()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path} cannot be read: {err}; give the launch line itself") from err
    return (*outer, *_launch(commands(text, variables), str(path)))


def _said(words: Sequence[str]) -> str | None:
    """The text behind ``-c``, ``-lc`` and the like; None where a file is meant."""
    for place, word in enumerate(words):
        if not word.startswith("-"):
            return None
        if word.endswith("c") and not word.startswith("--"):
            return next(iter(words[place + 1 :]), "")
    return None


def _launch(found: Sequence[Sequence[str]], name: str) -> tuple[str, ...]:
    """The command that trains: one with a model's sizes before others, the last of several."""
    plain = [tuple(_without_redirection(one)) for one in found]
    trains = [one for one in plain if any(w.endswith(".py") for w in one) or _wraps(one)]
    sized = [one for one in trains if any(word in _SIZES for word in one)]
    if not trains:
        raise ConfigError(
            f"{name} starts no training script that its text alone leads to; nothing of it is run, "
            "so give the launch line itself after --"
        )
    return (sized or trains)[-1]


def _wraps(words: Sequence[str]) -> bool:
    place = _wrapper(words)
    return place is not None and len(words) > place + 1


def _without_redirection(words: Sequence[str]) -> Iterator[str]:
    is_target = False
    for word in words:
        found = _REDIRECTED.match(word)
        if found is not None:
            is_target = found.end() == len(word) and "&" not in word
        elif is_target:
            is_target = False
        else:
            yield word
