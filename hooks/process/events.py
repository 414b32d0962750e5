"""Process events: full garbage collections inside steps, and forks.

Only full collections are noted, since young ones occur in every step.  A child that training
forks, such as a data loader's worker, is not training.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# Collections of this generation take long enough to show in a step time.
_OLDEST = 2


class CollectionWatch:
    """Calls ``on_full`` when a full collection begins, between ``begin`` and ``end``."""

    def __init__(self, on_full: Callable[[], object]) -> None:
        self._on_full = on_full

    def begin(self) -> None:
        """Start watching, unless it has started already."""
        if self._on_collection not in gc.callbacks:
            gc.callbacks.append(self._on_collection)

    def end(self) -> None:
        """Stop watching."""
        with suppress(ValueError):
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info.get("generation") == _OLDEST:
            self._on_full()


def in_forked_child(owner: Any, do: Callable[[Any], object]) -> None:
    """Call ``do(owner)`` in every child forked from now on, for as long as ``owner`` lives here.

    ``do`` takes no lock: a thread may have held it at the fork.
    """
    reference = weakref.ref(owner)

    def after_fork() -> None:
        living_owner = reference()
        if living_owner is not None:
            with suppress(Exception):
                do(living_owner)

    os.register_at_fork(after_in_child=after_fork)
