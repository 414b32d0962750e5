"""Copies of recorded runs, for what writes plans and fits beside them."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

_GOLDEN = Path(__file__).parents[1] / "golden"


@cache
def golden_copy(name: str) -> Path:
    """A copy of a folder of ``tests/golden``, one for each process of tests, gone at its end."""
    home = tempfile.mkdtemp(prefix="golden-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return Path(shutil.copytree(_GOLDEN / name, Path(home, name)))
