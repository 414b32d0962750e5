"""Reading files that anything may have been put in place of: bounded, never waiting, no links."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...calib.plain_json import parse_json
from ...calib.shell import is_word

# Ours have kilobytes; nobody's file is read into memory whole because of its name.
MOST_BYTES = 4 * 2**20


def read_bounded(
    path: Path, most_nbytes: int = MOST_BYTES, *, is_own: bool = False
) -> bytes | None:
    """The whole of a regular file; None where there is none, it cannot be read, or it is longer.

    With ``is_own`` also None where it is another user's, or others may write it.
    """
    flags = os.O_RDONLY
    for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC"):
        flags |= getattr(os, name, 0)
    try:
        handle = os.open(path, flags)
    except (OSError, ValueError):
        return None
    try:
        told = os.fstat(handle)
        if not stat.S_ISREG(told.st_mode):
            return None
        is_others = told.st_uid != os.geteuid() or told.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if is_own and is_others:
            return None
        parts: list[bytes] = []
        left = most_nbytes + 1
        while left and (part := os.read(handle, min(left, 2**20))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts) if left else None
    except OSError:
        return None
    finally:
        os.close(handle)


def read_object(path: Path) -> Mapping[str, Any] | None:
    """The JSON object of a file; None where there is none that can be read."""
    data = read_bounded(path)
    if data is None:
        return None
    try:
        value = parse_json(data)
    except (ValueError, MemoryError):
        return None
    return value if isinstance(value, dict) else None


def number(value: object, most: float = 1e15) -> float:
    """A value of a file as a finite number; 0.0 where it is none, or beyond ``most``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    try:
        found = float(value)
    except OverflowError:
        return 0.0
    return found if math.isfinite(found) and abs(found) <= most else 0.0


def words(value: object) -> tuple[str, ...]:
    """The words of a command of a file; empty where it holds none."""
    if not isinstance(value, list):
        return ()
    if not all(isinstance(word, str) and is_word(word) for word in value):
        return ()
    return tuple(value)
