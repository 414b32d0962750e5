"""Entry point of ``--calibrate``: one session per process; each adapter waits for its host."""

from __future__ import annotations

from .adapters import ADAPTERS
from .process import Settings, pass_over_package
from .session import begin


def start(settings: Settings) -> None:
    """Begin this process's session and wait for a host; a second call does nothing."""
    session = begin(settings)
    if session is not None:
        for wait_for in ADAPTERS:
            wait_for(session)
        pass_over_package()
