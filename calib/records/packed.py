"""Compact records: many lines of a file as one, and the ranks of a group as runs.

Lines are compressed, so that a whole window fits into a file of limited size.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache

from ..errors import RecordError

MAX_NBYTES = 64 << 20
"""Largest unpacked size of one packed line; more is damage."""
MAX_LINES = 1_000_000
"""Most lines in one packed line."""
MAX_LINE_NBYTES = MAX_NBYTES
"""Most characters of one line of a file."""
# A megabyte can unpack to a gigabyte: limit the unpacked size, not the size on disk.
MAX_TOTAL_NBYTES = 1 << 29
"""Most characters of all lines of a file after unpacking; the rest is not read."""
_LEAST = 64
"""Least characters that a line counts as: an empty one costs time as well."""
UNREAD = f"more than {MAX_TOTAL_NBYTES} characters of records; the rest is not read"
"""Stands for the lines beyond that limit."""
_HEAD = '{"type": "packed", "data": "'
_TAIL = '"}\n'
MAX_RANKS = 1 << 20
"""Most ranks of a group; real ones may have 16,384, and more than this is damage."""


class Packer:
    """Packs lines up to a size limit; ``add`` takes a batch whole, or not at all if too large."""

    def __init__(self, limit_nbytes: int) -> None:
        self._zip = zlib.compressobj()
        self._parts: list[bytes] = []
        # Base64 turns three bytes into four; the end of the stream takes some more.
        self.remaining_nbytes = (limit_nbytes - len(_HEAD) - len(_TAIL)) * 3 // 4 - 16
        """Compressed bytes that still fit."""

    def add(self, lines: Iterable[str]) -> bool:
        """Add lines, each ending in a newline; True if the whole batch fitted."""
        trial = self._zip.copy()
        part = trial.compress("".join(lines).encode()) + trial.flush(zlib.Z_SYNC_FLUSH)
        if len(part) > self.remaining_nbytes:
            return False
        self._zip = trial
        self._parts.append(part)
        self.remaining_nbytes -= len(part)
        return True

    def line(self) -> str:
        """Return the packed line with its newline; nothing can be added afterwards."""
        data = b"".join((*self._parts, self._zip.flush()))
        return f"{_HEAD}{base64.b64encode(data).decode()}{_TAIL}"


def pack(lines: Iterable[str]) -> str:
    """Pack all lines into one."""
    packer = Packer(MAX_NBYTES)
    packer.add(lines)
    return packer.line()


def unpacked(lines: Iterable[str]) -> Iterator[str]:
    r"""Yield the lines with packed ones expanded in place; a damaged one stays as it is.

    >>> list(unpacked(["a\n", pack(["b\n", "c\n"])]))
    ['a\n', 'b\n', 'c\n']
    """
    remaining_nbytes = MAX_TOTAL_NBYTES
    for line in lines:
        inside = [line]
        if line.startswith(_HEAD):
            with suppress(RecordError):
                inside = _inside(line)
        remaining_nbytes -= sum(max(_LEAST, len(one)) for one in inside)
        if remaining_nbytes < 0:
            yield UNREAD
            return
        yield from inside


def unzipped(text: str, most_nbytes: int = MAX_NBYTES) -> bytes:
    """Return the bytes that base64 text unpacks to; raise ``ValueError`` if it is damaged, or if
    they are more than a limit."""
    unzip = zlib.decompressobj()
    try:
        data = unzip.decompress(base64.b64decode(text, validate=True), most_nbytes)
    except zlib.error as err:
        raise ValueError(str(err)) from err
    if not unzip.eof:
        raise ValueError(f"it is cut off, or unpacks to more than {most_nbytes} bytes")
    return data


def _inside(line: str) -> list[str]:
    try:
        text = unzipped(json.loads(line)["data"])
        if text.count(b"\n") > MAX_LINES:
            raise ValueError(f"more than {MAX_LINES} lines")
        return text.decode().splitlines(keepends=True)
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise RecordError(f"packed line is damaged ({err}); skipped") from err


@lru_cache(maxsize=256)
def to_runs(ranks: tuple[int, ...]) -> str:
    """Return ranks as runs ``first-last`` or ``first-last:stride`` and single ones, with commas.

    >>> to_runs((0, 1, 2, 3)), to_runs((5, 13, 21)), to_runs((0, 1, 2, 8, 9, 10)), to_runs((7, 3))
    ('0-3', '5-21:8', '0-2,8-10', '7,3')
    """
    parts, at = [], 0
    while at < len(ranks):
        length = _run_length(ranks, at)
        # Two ranks as a run are no shorter.
        if length < 3:
            parts.append(str(ranks[at]))
            at += 1
            continue
        stride = ranks[at + 1] - ranks[at]
        tail = "" if stride == 1 else f":{stride}"
        parts.append(f"{ranks[at]}-{ranks[at + length - 1]}{tail}")
        at += length
    return ",".join(parts)


@lru_cache(maxsize=256)
def from_runs(text: str) -> tuple[int, ...]:
    """Return the ranks that ``to_runs`` was given; the same object for the same text.

    Raise ``RecordError`` if the text has another form.

    >>> from_runs("0-2,5-21:8")
    (0, 1, 2, 5, 13, 21)
    """
    ranks: list[int] = []
    for part in text.split(","):
        bounds, _, stride = part.partition(":")
        first, _, last = bounds.partition("-")
        numbers = (first, last or first, stride or "1")
        if not all(n.isascii() and n.isdigit() for n in numbers):
            raise RecordError(f"ranks {text[:40]!r} are not runs such as 0-7,16-30:2; skipped")
        begin, end, step = map(int, numbers)
        if not step or end < begin or (end - begin) // step + len(ranks) >= MAX_RANKS:
            raise RecordError(f"ranks {text[:40]!r} are not runs such as 0-7,16-30:2; skipped")
        ranks.extend(range(begin, end + 1, step))
    return tuple(ranks)


def _run_length(ranks: Sequence[int], at: int) -> int:
    """Return the number of entries from ``at`` on that rise by a constant stride."""
    if at + 1 >= len(ranks) or ranks[at + 1] <= ranks[at]:
        return 1
    stride, end = ranks[at + 1] - ranks[at], at + 2
    while end < len(ranks) and ranks[end] - ranks[end - 1] == stride:
        end += 1
    return end - at
