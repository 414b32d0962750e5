"""Cache of an answer in the directory that it was made from, named by a hash of its inputs.

Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from ...calib.records.files import PRIVATE, is_ours, replace_file
from ...calib.records.run_values import LAUNCH, RUNS
from ..store.run_folders import followed, read_bounded, top_of

_MOST_NBYTES = 64 << 20
# Few states of a directory are queried again; older answers would only fill the disk.
_MOST_CACHED = 8
_READ = ("records/*/*", "imported/*.csv", "*.parquet", f"{RUNS}/*/*.parquet", f"{RUNS}/*/{LAUNCH}")
"""Patterns of the files below a directory that a fit reads."""
_LIBRARIES = ("numpy", "scipy", "pandas", "sklearn", "xgboost")
_PACKAGE = Path(__file__).parents[2]


class CachedFile:
    """Answer to one question about directories, for the current data, code and libraries.

    Its file name, ``fit-*.npz`` by the pattern ``name``, contains a hash of all of these, so that
    any change gives another name.  ``read`` are patterns of further files that the answer depends
    on.
    """

    def __init__(
        self, name: str, question: Sequence[object], *directories: Path, read: Sequence[str] = ()
    ) -> None:
        self._top = top_of(directories[0])[0]
        where = [str(followed(path).absolute()) for path in directories]
        key_parts = [question, where, *_states(directories, (*_READ, *read))]
        key = hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()
        self._path = self._top / name.replace("*", key[:16])
        self._names = name.replace("*", "[0-9a-f]" * 16)

    def read(self) -> bytes:
        """Return the cached bytes; empty if there are none, or another user could have written
        them."""
        return read_bounded(self._path, _MOST_NBYTES, is_private=True) or b""

    def write(self, body: bytes) -> None:
        """Cache an answer if the directory is writable, and delete the oldest ones of its kind."""
        with suppress(OSError):
            replace_file(self._path, body, mode=PRIVATE)
            cached = sorted(self._top.glob(self._names), key=os.path.getmtime)
            for path in filter(is_ours, cached[:-_MOST_CACHED]):
                path.unlink()


def _states(directories: Sequence[Path], patterns: Sequence[str]) -> Iterator[tuple[object, ...]]:
    """Yield path, size and times of change of every data, code and library file involved."""
    tops = (top_of(directory)[0] for directory in directories)
    read = [path for top in tops for pattern in patterns for path in top.glob(pattern)]
    specs = (find_spec(name) for name in _LIBRARIES)
    theirs = [Path(spec.origin) for spec in specs if spec is not None and spec.origin]
    ours = [*_PACKAGE.glob("launch/*/*.py"), *_PACKAGE.glob("calib/**/*.py")]
    for path in sorted([*read, *theirs, *ours, *_PACKAGE.glob("calib/**/*.json")]):
        with suppress(OSError):
            file_stat = path.stat()
            yield (
                str(path),
                file_stat.st_size,
                file_stat.st_mtime_ns,
                file_stat.st_ctime_ns,
                file_stat.st_ino,
            )
