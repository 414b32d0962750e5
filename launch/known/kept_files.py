"""An answer that is kept in the directory that it was made from, while that stays as it is.

It holds for the very files that it was made from, for this code and for the libraries that are
here; anything else, and anything damaged or another user's, is passed over.  Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from ...calib.records.files import PRIVATE, replace_file
from ...calib.records.launch import LAUNCH, RUNS
from ..directory.bounded_files import read_bounded
from ..directory.run_folders import top_of

_MOST_NBYTES = 64 << 20
# A directory is asked about few states of itself; older answers would only fill the disk.
_MOST_KEPT = 8
_READ = (
    "records/*/*",
    "imported/*.csv",
    "*.parquet",
    f"{RUNS}/*/*.parquet",
    f"{RUNS}/*/{LAUNCH}",
)
"""All that a fit is made from, below a directory."""
_LIBRARIES = ("numpy", "scipy", "pandas", "sklearn", "xgboost")


class KeptFile:
    """What is kept of one question to a directory, as it is there now.

    ``read`` are patterns of what the answer stands on beside the records; ``also`` are other
    directories that it is made from.
    """

    def __init__(
        self,
        directory: Path,
        kind: str,
        *,
        question: Sequence[object],
        also: Sequence[Path] = (),
        read: Sequence[str] = (),
    ) -> None:
        self._directories, self._patterns = (directory, *also), (*_READ, *read)
        self._key = self._state()
        asked = [*question, *(str(path.absolute()) for path in self._directories)]
        name = _sha256(json.dumps(asked).encode())[:16]
        self._path = top_of(directory)[0] / f"{kind}-{name}.json"
        self._names = f"{kind}-{'[0-9a-f]' * 16}.json"

    def read(self) -> bytes | None:
        """What was kept; None where there is nothing, or it is stale, damaged or another user's."""
        try:
            whole = read_bounded(self._path, _MOST_NBYTES, is_own=True) or b""
            key, digest, body = whole.split(b"\n", 2)
            is_ours = key.decode() == self._key and digest.decode() == _sha256(body)
        except ValueError:
            return None
        return body if is_ours else None

    def write(self, body: bytes) -> None:
        """Keep an answer that was made since this was opened, where that can be done.

        Not where files have changed meanwhile.
        """
        head = f"{self._key}\n{_sha256(body)}\n".encode()
        if len(head) + len(body) > _MOST_NBYTES or self._state() != self._key:
            return
        with suppress(OSError):
            replace_file(self._path, head + body, mode=PRIVATE)
            kept = sorted(self._path.parent.glob(self._names), key=os.path.getmtime)
            for path in kept[:-_MOST_KEPT]:
                path.unlink()

    def _state(self) -> str:
        """Of every file that an answer would read, what fits in this package, and the libraries.

        A hash of names, sizes and times of change.
        """
        tops = (top_of(directory)[0] for directory in self._directories)
        read = [path for top in tops for pattern in self._patterns for path in top.glob(pattern)]
        specs = (find_spec(name) for name in _LIBRARIES)
        theirs = [Path(spec.origin) for spec in specs if spec is not None and spec.origin]
        package = Path(__file__).parents[2]
        ours = [*package.glob("launch/*/*.py"), *package.glob("calib/**/*.py")]
        found = []
        for path in sorted([*read, *theirs, *ours, *package.glob("calib/**/*.json")]):
            with suppress(OSError):
                told = path.stat()
                changed = told.st_mtime_ns, told.st_ctime_ns, told.st_ino
                found.append((str(path), told.st_size, *changed))
        return _sha256(json.dumps(found).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
