"""Files that are replaced at once, under temporary names that cannot be guessed.

JSON and text are replaced at once, added to by the line, and read within bounds.  Standard library
only: hooks write by it in the training process, and what reads answers alone is quick.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import pkgutil
import stat
from collections.abc import Callable, Mapping
from functools import cache
from io import BufferedRandom
from pathlib import Path
from typing import IO, Any, TypeAlias

from ..errors import RecordError
from ..plain_json import Json, JsonObject, parse_json

PackageData: TypeAlias = Mapping[str, Any]
"""What our own files hold: their form is known to those who read them."""
PRIVATE = 0o600
"""Of files that hold arguments or environment."""
OPEN = 0o666
"""Less the umask, as for any file."""
# Lines hold times in nanoseconds: two files whose last 256 bytes agree are one file.
_NUM_COMPARED = 256


def replace_file(path: Path, data: bytes | str, *, mode: int = OPEN) -> None:
    """Replace ``path`` with ``data`` at once; text as UTF-8, what has no UTF-8 escaped.

    The folder is made where it is missing.  A symbolic link at ``path`` is replaced, never
    followed.  Raises ``OSError``.
    """
    whole = encoded(data) if isinstance(data, str) else data
    replace_by(path, lambda file: file.write(whole), mode=mode)


def encoded(text: str) -> bytes:
    """The UTF-8 of a text; bytes of names that have none are escaped, as ``\\udcff``."""
    return text.encode("utf-8", "backslashreplace")


def replace_by(path: Path, write: Callable[[IO[bytes]], object], *, mode: int = OPEN) -> None:
    """The same with a function that writes into an open file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:64]}.{os.urandom(8).hex()}.tmp")
    # With O_EXCL a name that is there, a link among them, is an error and never followed.
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)
    handle = os.open(temporary, flags, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.replace(temporary, path)
    except BaseException as err:
        temporary.unlink(missing_ok=True)
        if isinstance(err, OSError):
            err.filename = str(path)  # a full disk names no file, and the temporary one is gone
        raise


def open_owned(path: Path, *, mode: int = OPEN) -> BufferedRandom:
    """A file of our own to read and to add to; its folder and it are made where they are missing.

    Raises ``OSError`` at once, and touches nothing, where a link, a pipe, a folder or another
    user's file is in its place: a directory may be one that others write to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_APPEND
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY"):
        flags |= getattr(os, name, 0)
    try:
        return os.fdopen(os.open(path, flags | os.O_CREAT | os.O_EXCL, mode), "ab+")
    except FileExistsError:
        # Looked at before it is opened: that alone may do something to a device.
        is_ours = stat.S_ISREG(path.lstat().st_mode)
    if is_ours:
        handle = os.open(path, flags)
        if _is_owned(os.fstat(handle), path.parent):
            return os.fdopen(handle, "ab+")
        os.close(handle)
    why = "a link, a pipe, a folder or another user's file is in its place: remove it"
    raise OSError(errno.EEXIST, why, str(path))


def _is_owned(status: os.stat_result, folder: Path) -> bool:
    """True for a regular file of ours, or of the owner of what we make in its folder: a mount may
    say another."""
    if not stat.S_ISREG(status.st_mode) or status.st_uid == os.geteuid():
        return stat.S_ISREG(status.st_mode)
    temporary = folder / f".{os.urandom(8).hex()}.tmp"
    try:
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE)
    except OSError:
        return False
    temporary.unlink(missing_ok=True)
    owner = os.fstat(handle).st_uid
    os.close(handle)
    return owner == status.st_uid


@cache
def read_package_json(package: str, name: str) -> PackageData:
    """The JSON value of a file that is installed in a package; read once, so never change it."""
    return json.loads(pkgutil.get_data(package, name) or b"")


class Tail:
    """A file that grows, and how far it has been read; whole lines only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._last = b""
        """The bytes before the offset: a file that was written anew has others there."""

    def read(self) -> tuple[bytes, bytes]:
        """Lines since the last reading, and the beginning of one that has no end yet.

        Raises ``OSError``.
        """
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            self._file = status.st_dev, status.st_ino
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._last = (self._last + whole)[-_NUM_COMPARED:]
        return whole, data[len(whole) :]

    def is_other(self) -> bool:
        """True where what was read is not in the file any more: shrunk, replaced or gone."""
        if self._file is None:
            return False
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
                    return True
                file.seek(self._offset - len(self._last))
                return file.read(len(self._last)) != self._last
        except OSError:
            return True


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
        with open_owned(path) as file:
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
