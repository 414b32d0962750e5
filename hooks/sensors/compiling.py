"""When torch begins to compile: what is put on for a step comes off before any frame is read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..process.post_import import when_imported

_COMPILER = "torch._dynamo"
_CALLBACKS = "torch._dynamo.callback"


class CompileWatch:
    """Calls ``on_start`` when a compilation begins, between ``begin`` and ``remove``."""

    def __init__(self, on_start: Callable[[], object]) -> None:
        # One object: a list of callbacks is searched by identity, and takes it back as it got it.
        self._start = lambda *_: on_start()
        self._place: list[Callable[..., Any]] | None = None

    def begin(self) -> None:
        """Watch; a compiler that is not there yet begins when it is imported."""
        handler = getattr(sys.modules.get(_CALLBACKS), "callback_handler", None)
        self._place = place = getattr(handler, "start_callbacks", _BEFORE_IMPORT)
        if place is _BEFORE_IMPORT and not place:
            when_imported(_COMPILER, lambda module: None, during=_giving_way)
        place.append(self._start)

    def remove(self) -> None:
        """Watch no more."""
        place, self._place = self._place, None
        if place is not None and self._start in place:
            place.remove(self._start)


_BEFORE_IMPORT: list[Callable[..., Any]] = []


@contextmanager
def _giving_way() -> Iterator[None]:
    for start in list(_BEFORE_IMPORT):
        start()
    yield
