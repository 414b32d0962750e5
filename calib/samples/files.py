"""Files that are replaced at once, under temporary names that nobody can know before.

Standard library only: the hooks write by it in the training process.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO

PRIVATE = 0o600
"""Of files that hold arguments or environment."""
OPEN = 0o666
"""Less the umask, as for any file."""


def replace_file(path: Path, data: bytes | str, *, mode: int = OPEN) -> None:
    """Replace ``path`` with ``data`` at once; text as UTF-8.

    The folder is made where it is missing.  A symbolic link at ``path`` is replaced, never
    followed.  Raises ``OSError``.
    """
    whole = data.encode() if isinstance(data, str) else data
    replace_by(path, lambda file: file.write(whole), mode=mode)


def replace_by(path: Path, write: Callable[[IO[bytes]], object], *, mode: int = OPEN) -> None:
    """The same with a function that writes into an open file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:64]}.{secrets.token_hex(8)}.tmp")
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
