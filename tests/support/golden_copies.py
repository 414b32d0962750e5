"""Copies of recorded runs, for tests that write plans and fits into them."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

_GOLDEN = Path(__file__).parents[1] / "golden"


@cache
def golden_copy(name: str) -> Path:
    """Return a copy of a folder of ``tests/golden``, one per test process, deleted at its end."""
    home = tempfile.mkdtemp(prefix="golden-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return Path(shutil.copytree(_GOLDEN / name, Path(home, name)))
