"""Queries by Slurm's commands, which may be absent or hang.  Standard library only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence

# A busy Slurm controller takes seconds to answer.
_PATIENCE_S = 20.0

Ask = Callable[[Sequence[str]], "str | None"]
"""Maps a command to its output; None if it is absent, fails or hangs."""


def ask_slurm(command: Sequence[str]) -> str | None:
    """Return a command's output; None if it is absent, fails or does not answer in time."""
    try:
        done = subprocess.run(
            list(command),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=True,
            timeout=_PATIENCE_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout
