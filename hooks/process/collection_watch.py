"""Full garbage collections inside steps: they stand out, where young ones come in every step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress

_OLDEST = 2


class CollectionWatch:
    """Calls ``on_full`` when a full collection begins, between ``begin`` and ``end``."""

    def __init__(self, on_full: Callable[[], object]) -> None:
        self._on_full = on_full

    def begin(self) -> None:
        """Watch; does nothing where it watches."""
        if self._on_collection not in gc.callbacks:
            gc.callbacks.append(self._on_collection)

    def end(self) -> None:
        """Stop watching."""
        with suppress(ValueError):
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info.get("generation") == _OLDEST:
            self._on_full()
