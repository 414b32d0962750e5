"""Where ``--calibrate`` begins: one session a process, and every adapter waits for its host."""

from __future__ import annotations

from .adapters import registry
from .process.settings import Settings
from .process.stand_ins import pass_over_package
from .session.session import begin


def start(settings: Settings) -> None:
    """Begin this process's session and wait for a host; a second call changes nothing."""
    session = begin(settings)
    if session is not None:
        for wait_for in registry.ADAPTERS:
            wait_for(session)
        pass_over_package()
