"""Entry point of ``--calibrate``: one session per process; each adapter waits for its host."""

from __future__ import annotations

from collections.abc import Callable

from .adapters.registry import ADAPTERS
from .process.settings import Settings
from .process.stand_ins import pass_over_package
from .session.session import begin


def start(settings: Settings, on_training: Callable[[], object] = lambda: None) -> None:
    """Begin this process's session and wait for a host; a second call does nothing.

    ``on_training`` is called once training begins, if this process is to answer for it.
    """
    session = begin(settings, on_training)
    if session is not None:
        for wait_for in ADAPTERS:
            wait_for(session)
        pass_over_package()
