"""Atomic replacement of files, through temporary names that cannot be guessed.

Only files that Forerun wrote are replaced, which their content shows (``is_ours``).  JSON and text
are replaced atomically, appended to by the line, and read up to a size limit.
Standard library only: hooks use it in the training process, and programs that only read answers
start fast.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import pkgutil
import re
import stat
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from io import BufferedRandom
from pathlib import Path
from typing import IO, Any, TypeAlias

from ..errors import RecordError
from ..plain_json import Json, JsonObject, parse_json

PackageData: TypeAlias = Mapping[str, Any]
"""Content of the files in our packages; their readers know its form."""
PRIVATE = 0o600
"""Mode of files with arguments or environment variables."""
OPEN = 0o666
"""Mode of other files, before the umask."""
CREATED = {"created_by": "forerun"}
"""Mark of a JSON file of ours, and column of its tables."""
CREATED_BY = "created_by: forerun"
"""Mark of another file of ours, in a comment; Parquet has the key of its schema."""
MARKUP_COMMENT = f"\n<!-- {CREATED_BY} -->\n"
"""The mark in Markdown, HTML and SVG."""
_MARK = re.compile(
    rb'created_by"?:\s?"?forerun|forerun_schema|field_name": "created_by"|'
    rb'\A[^\n"]*,created_by\n|\A\{\s*"type": "packed"|'
    rb'\A\{\s*"schema": \d+,\s*"(?:launch_id|kind": "(?:forecast|end)")'
)
_MARKED_NBYTES = 1 << 16
"""Bytes at both ends of a file in which the mark is sought; Parquet has its keys at the end."""
_SEAL = b"# As it was written: "
"""Last line: digest of all before it, so that a script edited by the user is not replaced."""
# Lines have times in nanoseconds: two files whose last 256 bytes agree are the same file.
_NUM_COMPARED = 256


def replace_file(path: Path, data: bytes | str, *, mode: int = OPEN) -> None:
    """Replace ``path`` with ``data`` atomically; text is encoded as by ``encoded``.

    The folder is created if missing.  Raise ``OSError``: ``FileExistsError`` if something that is
    not ours is at ``path``, also a symbolic link, which is never followed.
    """
    whole = encoded(data) if isinstance(data, str) else data
    replace_by(path, lambda file: file.write(whole), mode=mode)


def encoded(text: str) -> bytes:
    """Return text as UTF-8; undecodable bytes of file names are escaped, as ``\\udcff``."""
    return text.encode("utf-8", "backslashreplace")


def replace_by(path: Path, write: Callable[[IO[bytes]], object], *, mode: int = OPEN) -> None:
    """Replace ``path`` as ``replace_file`` does, with what ``write`` puts into an open file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:64]}.{os.urandom(8).hex()}.tmp")
    # With O_EXCL an existing name, even a link, is an error and never followed.
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)
    handle = os.open(temporary, flags, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        refuse_foreign(path)
        os.replace(temporary, path)
    except BaseException as err:
        temporary.unlink(missing_ok=True)
        if isinstance(err, OSError):
            err.filename = str(path)  # a full disk names no file, and the temporary one is gone
        raise


def refuse_foreign(path: Path) -> None:
    """Raise ``FileExistsError`` if something that Forerun did not write is at ``path``."""
    if os.path.lexists(path) and not is_ours(path):
        why = "exists and was not written by forerun, so it is left as it is"
        raise FileExistsError(errno.EEXIST, why, str(path))


def is_ours(path: Path) -> bool:
    """Return True for a regular file with our mark; of scripts, for one not changed since."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        with path.open("rb") as file:
            head = file.read(_MARKED_NBYTES)
            if head[:2] == b"\x1f\x8b":
                with gzip.open(path) as unpacked:
                    head = unpacked.read(_MARKED_NBYTES)
            file.seek(-min(_MARKED_NBYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
            tail = file.read()
            if _SEAL in tail:
                file.seek(0)
                data = file.read()
                return data == sealed(data.rpartition(_SEAL)[0])
    except (OSError, EOFError, zlib.error):
        return False
    return _MARK.search(head) is not None or _MARK.search(tail) is not None


def sealed(data: bytes) -> bytes:
    """Return a script with the last line added by which ``is_ours`` recognises it."""
    return data + _SEAL + hashlib.sha256(data).hexdigest()[:16].encode() + b"\n"


def open_owned(path: Path, *, mode: int = OPEN) -> BufferedRandom:
    """Open a file of our own for reading and appending; create it and its folder if missing.

    Raise ``OSError`` at once, without side effects, if a link, a pipe, a folder or another user's
    file is in its place: others may be able to write to the directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_APPEND
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY"):
        flags |= getattr(os, name, 0)
    try:
        return os.fdopen(os.open(path, flags | os.O_CREAT | os.O_EXCL, mode), "ab+")
    except FileExistsError:
        # Check before opening: opening a device can already have an effect.
        is_ours = stat.S_ISREG(path.lstat().st_mode)
    if is_ours:
        handle = os.open(path, flags)
        if _is_owned(os.fstat(handle), path.parent):
            return os.fdopen(handle, "ab+")
        os.close(handle)
    why = "a link, a pipe, a folder or another user's file is in its place: remove it"
    raise OSError(errno.EEXIST, why, str(path))


def _is_owned(status: os.stat_result, folder: Path) -> bool:
    """True for a regular file of ours, or of the owner that files created by us get in its folder:
    a mount may map owners."""
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
    """Return the JSON value of a file installed in a package; cached, so never modify it."""
    return json.loads(pkgutil.get_data(package, name) or b"")


class Tail:
    """A growing file and the offset up to which it has been read, in whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._last = b""
        """Bytes before the offset; a rewritten file has others there."""

    def read(self) -> tuple[bytes, bytes]:
        """Return the lines since the last call, and the beginning of an unfinished one.

        Raise ``OSError``.
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
        """True if the file no longer has what was read: it shrank, was replaced or is gone."""
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
"""Default of the gzip program; 9 takes three times as long for 1 % less."""


def write_json(path: Path, value: object, *, mode: int = OPEN) -> None:
    """Replace ``path`` with ``value`` atomically; keys keep their order, NaN is refused.

    Compressed JSON is on one line: nobody reads it, and it is written many times as fast.
    """
    if path.suffix == ".gz":
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    else:
        text = json.dumps(value, indent=2, allow_nan=False)
    text += "\n"
    write_text(path, text, mode=mode)


def write_text(path: Path, text: str, *, mode: int = OPEN) -> None:
    """Replace ``path`` with the text atomically; compress it if the name ends in ``.gz``."""
    data = encoded(text)
    if path.suffix == ".gz":
        data = gzip.compress(data, _GZIP_LEVEL, mtime=0)
    replace_file(path, data, mode=mode)


def append_line(path: Path, value: Mapping[str, object]) -> None:
    """Append ``value`` as one line of JSON, in one write; a torn last line stays separate.

    Raise ``OSError`` with the file's name, as ``open_owned``, and if its lines are not ours.
    """
    line = json.dumps({**CREATED, **value}, allow_nan=False) + "\n"
    try:
        with open_owned(path) as file:
            if file.seek(0, os.SEEK_END):
                refuse_foreign(path)
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode())
    except OSError as err:
        err.filename = str(path)
        raise


def read_lines(path: Path) -> tuple[list[JsonObject], tuple[str, ...]]:
    """Return the objects of a JSON-lines file, and a note on each skipped line.

    Raise ``RecordError`` if the file is missing or unreadable.
    """
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
    """Return the JSON value in ``path``; raise ``RecordError`` if it is missing or damaged."""
    data = _read_bounded(path, MAX_JSON_NBYTES)
    try:
        return parse_json(data)
    except ValueError as err:
        raise RecordError(f"{path} cannot be read ({err}); delete it and write it again") from err


def _read_bounded(path: Path, most_nbytes: int) -> bytes:
    """Return a whole file; raise ``RecordError`` if missing, no file, unreadable or larger."""
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
