"""A user's own script with places to fill in; it is read and never written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...calib.errors import ConfigError
from ..directory.bounded_files import read_bounded

PLACES = ("command", "time", "reason", "directory", "launch_id")
_PLACE = re.compile(r"(?<!\$)\{(" + "|".join(PLACES) + r")\}")
"""Not ``${time}``, which is the script's own; other braces stay as they are."""
_MOST_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The text of a template."""

    text: str

    def filled(self, values: Mapping[str, str]) -> str:
        """The text with each place filled; a line whose place has no value is left out.

        >>> Template(text="#SBATCH --time={time}\\nexec {command} ${command}\\n").filled(
        ...     {"command": "forerun run -- true", "time": ""}
        ... )
        'exec forerun run -- true ${command}\\n'
        """
        lines = []
        for line in self.text.splitlines():
            if all(values[name] for name in _PLACE.findall(line)):
                lines.append(_PLACE.sub(lambda match: values[match[1]], line))
        return "\n".join(lines) + "\n"


def read_template(path: Path) -> Template:
    """Raises ``OSError`` where it cannot be read, ``ConfigError`` where it is no template."""
    path.stat()
    data = read_bounded(path.resolve(), _MOST_BYTES)
    if data is None:
        raise ConfigError("no regular file below 1 MiB that can be read; give a script")
    text = data.decode("utf-8", "surrogateescape")
    if "command" not in _PLACE.findall(text):
        raise ConfigError("{command} is not in it; write it where the launch belongs")
    return Template(text=text)
