"""Many lines of a record file as one: compressed, so that a bounded file holds a whole window."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress

from ..errors import RecordError

MAX_NBYTES = 64 << 20
"""What one packed line may hold; more is damage."""
MAX_LINES = 1_000_000
"""In one packed line."""
MAX_LINE_NBYTES = MAX_NBYTES
"""Characters of one line of a file."""
# A megabyte can unpack to a gigabyte: the bound is on what comes out, not on what lies on disk.
MAX_TOTAL_NBYTES = 1 << 29
"""Characters of all lines of a file, packed ones unpacked; the rest is not read."""
_LEAST = 64
"""Characters that every line counts as: an empty one costs time as well."""
UNREAD = f"more than {MAX_TOTAL_NBYTES} characters of records; the rest is not read"
"""In place of the lines beyond."""
_HEAD = '{"type": "packed", "data": "'
_TAIL = '"}\n'


class Packer:
    """Lines under a bound: ``add`` takes a batch wholly or, where it would not fit, not at all."""

    def __init__(self, limit_nbytes: int) -> None:
        self._zip = zlib.compressobj()
        self._parts: list[bytes] = []
        # In base64 three bytes become four; the stream's end takes some more.
        self.num_left = (limit_nbytes - len(_HEAD) - len(_TAIL)) * 3 // 4 - 16
        """Compressed bytes that still fit."""

    def add(self, lines: Iterable[str]) -> bool:
        """True where the batch is in; each line ends in a newline."""
        trial = self._zip.copy()
        part = trial.compress("".join(lines).encode()) + trial.flush(zlib.Z_SYNC_FLUSH)
        if len(part) > self.num_left:
            return False
        self._zip = trial
        self._parts.append(part)
        self.num_left -= len(part)
        return True

    def line(self) -> str:
        """The packed line with its newline; nothing can be added any more."""
        data = b"".join((*self._parts, self._zip.flush()))
        return f"{_HEAD}{base64.b64encode(data).decode()}{_TAIL}"

    @staticmethod
    def compressed_nbytes(lines: Iterable[str]) -> int:
        """Bytes of ``num_left`` that the lines would take by themselves."""
        return len(zlib.compress("".join(lines).encode()))


def pack(lines: Iterable[str]) -> str:
    """All lines as one."""
    packer = Packer(MAX_NBYTES)
    packer.add(lines)
    return packer.line()


def unpacked(lines: Iterable[str]) -> Iterator[str]:
    r"""The lines with those inside packed ones in their place; a damaged one stays as it is.

    >>> list(unpacked(["a\n", pack(["b\n", "c\n"])]))
    ['a\n', 'b\n', 'c\n']
    """
    num_left = MAX_TOTAL_NBYTES
    for line in lines:
        inside = [line]
        if line.startswith(_HEAD):
            with suppress(RecordError):
                inside = _inside(line)
        num_left -= sum(max(_LEAST, len(one)) for one in inside)
        if num_left < 0:
            yield UNREAD
            return
        yield from inside


def _inside(line: str) -> list[str]:
    try:
        data = base64.b64decode(json.loads(line)["data"], validate=True)
        unzip = zlib.decompressobj()
        text = unzip.decompress(data, MAX_NBYTES)
        if text.count(b"\n") > MAX_LINES:
            raise ValueError(f"more than {MAX_LINES} lines")
        return text.decode().splitlines(keepends=True)
    except (ValueError, KeyError, TypeError, RecursionError, zlib.error, binascii.Error) as err:
        raise RecordError(f"packed line is damaged ({err}); skipped") from err
