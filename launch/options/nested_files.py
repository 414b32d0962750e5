"""Files of arguments in parts: a trainer's overrides over a model of another file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...calib.errors import ConfigError

Read = Callable[[Path], Mapping[str, Any]]
_USUAL = re.compile(r"\$\{\w+:(-?)([^}]*)\}")
"""``${NAME:word}``, in which the word counts where the variable is not set."""
_PLACES = (".", "models", "models/megatron", "configs/models/megatron")
_PARENTS, _MOST_DEEP = 6, 5
_BASES = ("bases", "extends", "includes")


def joined(path: Path, value: Mapping[str, Any], read: Read) -> Mapping[str, Any]:
    """The arguments of a parsed file in one mapping, as ``modules: NAME: {model, overrides}`` says.

    ``read`` parses another file; models lie beside the file, or below ``models`` of a folder around
    it.  ``${NAME:word}`` is its word: no variable is looked up.  Raises ``ConfigError`` where the
    file of a model is not there.
    """
    part = next((one for one in _parts(value) if isinstance(one.get("overrides"), Mapping)), None)
    if part is None:
        return _filled(value)
    model: dict[str, Any] = {}
    if name := part.get("model"):
        model = _model(path, str(_filled_text(str(name))), read, _MOST_DEEP)
    return {**model, **_filled(part["overrides"])}


def _parts(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    modules = value.get("modules")
    parts = modules.values() if isinstance(modules, Mapping) else ()
    return [one for one in parts if isinstance(one, Mapping)]


def _model(path: Path, name: str, read: Read, most_deep: int) -> dict[str, Any]:
    """The model of a file over those that it builds on, the nearest last."""
    folders = list(path.absolute().parents)[:_PARENTS]
    places = (folder / place / name for folder in folders for place in _PLACES)
    place = next((one for one in places if one.is_file()), None)
    if place is None or not most_deep:
        raise ConfigError(
            f"{path} takes its model from {name}, which is not beside it; put that file there, or "
            "give the launch line after --"
        )
    own = read(place)
    values: dict[str, Any] = {}
    for key in _BASES:
        bases = own.get(key) or ()
        for base in [bases] if isinstance(bases, str) else bases:
            values.update(_model(place, str(base), read, most_deep - 1))
    rest = {key: value for key, value in own.items() if key not in _BASES}
    return {**values, **_filled(rest)}


def _filled(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _filled_text(one) if isinstance(one, str) else one for key, one in value.items()}


def _filled_text(text: str) -> Any:
    """A text with the words of its variables; a number or a switch where that is all of it.

    >>> [_filled_text(text) for text in ("${SEQ:4096}", "a-${B:c}", "${D:true}", "$E")]
    [4096, 'a-c', True, '$E']
    """
    filled = _USUAL.sub(lambda match: match[2], text)
    if filled == text:
        return text
    if filled.lower() in ("true", "false"):
        return filled.lower() == "true"
    return int(filled) if filled.removeprefix("-").isdecimal() else filled
