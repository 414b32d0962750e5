"""Asks Slurm's own commands, which may be absent or hang.  Standard library only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence

# A busy controller takes seconds.
_PATIENCE_S = 20.0

Ask = Callable[[Sequence[str]], "str | None"]
"""A command to what it prints; None where it is absent, fails or hangs."""


def ask_slurm(command: Sequence[str]) -> str | None:
    """What the command prints; None where it is absent, fails or does not answer in time."""
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
