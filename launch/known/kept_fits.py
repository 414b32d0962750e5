"""What the verbs know of a machine, and how it is kept beside the samples that it stands on.

A kept fit holds for the very files that it was made from, for this code and for the libraries that
are here; anything else, and anything damaged, is passed over and the fit is made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path

from ...calib.answers import plain_models
from ...calib.errors import ForerunError
from ...calib.records.files import PRIVATE, replace_file
from ...calib.records.launch import LAUNCH, RUNS
from ...calib.steps.model import FittedSteps
from ...calib.workload.config import RunConfig
from ..directory.bounded_files import read_bounded
from ..directory.run_folders import top_of

_MOST_NBYTES = 64 << 20
# A directory is asked about few states of itself; older fits would only fill the disk.
_MOST_KEPT = 8
_READ = (
    "records/*/*",
    "imported/*.csv",
    "*.parquet",
    f"{RUNS}/*/*.parquet",
    f"{RUNS}/*/{LAUNCH}",
)
"""All that a fit is made from, below a directory."""
_NAMES = f"fitted-{'[0-9a-f]' * 16}.json"
_DAMAGED = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError, ImportError, ForerunError),
)
"""What making models of a damaged value, or of one of another version, may raise."""
_LIBRARIES = ("numpy", "scipy", "pandas", "sklearn", "xgboost")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """What a directory says of the steps of any layout."""

    name: str
    """The run, or the machine that was imported."""
    own: RunConfig
    """The layout that others are held against."""
    steps: FittedSteps
    memory_capacity_nbytes: int | None
    memory_offset_nbytes: int | None
    """What a measured peak had beyond its estimate; None where none was measured."""
    problems: tuple[str, ...] = ()


class KeptFit:
    """The fit of one question to a directory, as it is there now."""

    def __init__(
        self, directory: Path, *, question: tuple[str | None, ...], also: Sequence[Path]
    ) -> None:
        self._directories = (directory, *also)
        asked = [*question, *(str(path.absolute()) for path in self._directories)]
        name = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
        self._path = top_of(directory)[0] / f"fitted-{name}.json"
        self._key = self._state()

    def read(self) -> Machine | None:
        """What was kept; None where there is nothing, or it is stale, damaged or another user's."""
        try:
            whole = read_bounded(self._path, _MOST_NBYTES, is_own=True) or b""
            key, digest, body = whole.split(b"\n", 2)
            if key.decode() != self._key or digest.decode() != _sha256(body):
                return None
            return Machine(**plain_models.made(json.loads(body)))
        except _DAMAGED:
            return None

    def write(self, machine: Machine) -> None:
        """Keep a fit that was made since this was opened, where that can be done.

        Not where files have changed meanwhile, or a model holds what has no plain form.
        """
        with suppress(TypeError, OSError):
            values = {one.name: getattr(machine, one.name) for one in fields(machine)}
            body = json.dumps(plain_models.plain(values)).encode()
            head = f"{self._key}\n{_sha256(body)}\n"
            if len(head) + len(body) > _MOST_NBYTES or self._state() != self._key:
                return
            replace_file(self._path, head.encode() + body, mode=PRIVATE)
            kept = sorted(self._path.parent.glob(_NAMES), key=os.path.getmtime)
            for path in kept[:-_MOST_KEPT]:
                path.unlink()

    def _state(self) -> str:
        """Of every file that a fit would read, what fits in this package, and the libraries.

        A hash of names, sizes and times of change.
        """
        tops = (top_of(directory)[0] for directory in self._directories)
        read = [path for top in tops for pattern in _READ for path in top.glob(pattern)]
        specs = (find_spec(name) for name in _LIBRARIES)
        theirs = [Path(spec.origin) for spec in specs if spec is not None and spec.origin]
        here = Path(__file__).parent
        calib = here.parents[1] / "calib"
        ours = [*here.glob("*.py"), *calib.rglob("*.py"), *calib.rglob("*.json")]
        found = []
        for path in sorted([*read, *theirs, *ours]):
            with suppress(OSError):
                told = path.stat()
                changed = told.st_mtime_ns, told.st_ctime_ns, told.st_ino
                found.append((str(path), told.st_size, *changed))
        return _sha256(json.dumps(found).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
