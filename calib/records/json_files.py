"""JSON and text in files: replaced at once, added to by the line, read within bounds.

Standard library only: what reads answers alone is quick.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

from ..errors import RecordError
from ..plain_json import Json, JsonObject, parse_json
from .files import OPEN, encoded, open_own, replace_file

# Larger files are refused before they fill the memory.
MAX_JSON_NBYTES = 64 << 20
_GZIP_LEVEL = 6
"""As the program; 9 takes three times as long for a hundredth less."""


def write_json(path: Path, value: object, *, mode: int = OPEN) -> None:
    """Replace ``path`` with ``value`` at once; keys keep their order, NaN is refused.

    What is compressed is on one line: nobody reads it, and it is written many times as fast.
    """
    if path.suffix == ".gz":
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    else:
        text = json.dumps(value, indent=2, allow_nan=False)
    text += "\n"
    write_text(path, text, mode=mode)


def write_text(path: Path, text: str, *, mode: int = OPEN) -> None:
    """Replace ``path`` with the text at once; compressed where the name ends in ``.gz``."""
    data = encoded(text)
    if path.suffix == ".gz":
        data = gzip.compress(data, _GZIP_LEVEL, mtime=0)
    replace_file(path, data, mode=mode)


def append_line(path: Path, value: object) -> None:
    """Add ``value`` as one line of JSON, in one write; a torn last line stays a line of its own.

    Raises ``OSError`` with the file's name.
    """
    line = json.dumps(value, allow_nan=False) + "\n"
    try:
        with open_own(path) as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode())
    except OSError as err:
        err.filename = str(path)
        raise


def read_lines(path: Path) -> tuple[list[JsonObject], tuple[str, ...]]:
    """Objects of a file of JSON lines, and what was skipped; ``RecordError`` where none is."""
    lines = _read_bounded(path, MAX_JSON_NBYTES).decode(errors="replace").splitlines()
    values, problems = [], []
    for number, line in enumerate(lines, start=1):
        try:
            value = parse_json(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            values.append(value)
        elif line.strip():
            problems.append(f"{path.name} line {number}: damaged, skipped")
    return values, tuple(problems)


def read_json(path: Path) -> Json:
    """The JSON value in ``path``; ``RecordError`` where it is missing or damaged."""
    data = _read_bounded(path, MAX_JSON_NBYTES)
    try:
        return parse_json(data)
    except ValueError as err:
        raise RecordError(f"{path} cannot be read ({err}); delete it and write it again") from err


def _read_bounded(path: Path, most_nbytes: int) -> bytes:
    """A whole file; ``RecordError`` where it is missing, no file, cannot be read or is larger."""
    if path.exists() and not path.is_file():
        raise RecordError(f"{path} is not a file; remove it")  # a pipe would wait for its writer
    try:
        with path.open("rb") as file:
            data = file.read(most_nbytes + 1)
    except FileNotFoundError as err:
        raise RecordError(f"{path} does not exist; run with --calibrate first") from err
    except OSError as err:
        raise RecordError(f"{path} cannot be read ({err}); make it readable") from err
    if len(data) > most_nbytes:
        raise RecordError(
            f"{path} has more than {most_nbytes >> 20} MiB, more than Forerun writes; delete it"
        )
    return data
