"""Files that a user gives: read up to a limit, with an error of one line and a remedy."""

from __future__ import annotations

from pathlib import Path

from ...calib.errors import ConfigError
from ...calib.plain_json import Json, parse_json

MAX_NBYTES = 1 << 20
"""Size limit of a file of arguments or a script; real ones have a few kB."""


def read_beginning(path: Path, rule: str) -> bytes:
    """Return at most a byte more than ``MAX_NBYTES``."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_NBYTES + 1)
    except OSError as err:
        raise ConfigError(f"{path} cannot be read: {err}; {rule}") from err


def read_text(path: Path, rule: str) -> str:
    """Return a text file; raise ``ConfigError`` with ``rule`` if it cannot be read."""
    data = read_beginning(path, rule)
    if len(data) > MAX_NBYTES:
        raise ConfigError(f"{path} is larger than {MAX_NBYTES >> 20} MiB; {rule}")
    try:
        return data.decode()
    except UnicodeDecodeError as err:
        raise ConfigError(f"{path} cannot be read: {err}; {rule}") from err


def read_json(path: Path, rule: str) -> Json:
    """Return the value of a JSON file; raise ``ConfigError`` with ``rule`` if it has none."""
    try:
        return parse_json(read_text(path, rule))
    except ValueError as err:
        raise ConfigError(f"{path} is not JSON: {err}; {rule}") from err
