"""Start of a compilation, before which a step's hooks are removed, and stalls of the step's stream.

When the step's stream waits for another stream of its device, the work there is exposed.
``Stream.wait_stream`` and ``Stream.wait_event`` both call ``torch.cuda.Event.wait``, which has a
stand-in during hooked steps.  It queues a mark before the wait and one after it if the waiting
stream is the step's own.  Functional collectives (those of DTensor) wait in C++, through one
function of their module: with a stand-in, the wait is not charged to the operator that first uses
the result.  Compiled frames may be bound to that function: if there are any it is not replaced,
since that would recompile them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..process.guard import Guard
from ..process.post_import import when_imported
from ..process.stand_ins import StandIns
from .recorder import Recorder

_COMPILER = "torch._dynamo"
_CALLBACKS = "torch._dynamo.callback"


class CompileWatch:
    """Calls ``on_start`` when a compilation begins, between ``begin`` and ``remove``."""

    def __init__(self, on_start: Callable[[], object]) -> None:
        # One object: callbacks are removed from their list by identity.
        self._start = lambda *_: on_start()
        self._place: list[Callable[..., Any]] | None = None

    def begin(self) -> None:
        """Start watching; a compiler that is not loaded yet counts as begun when it is imported."""
        handler = getattr(sys.modules.get(_CALLBACKS), "callback_handler", None)
        self._place = place = getattr(handler, "start_callbacks", _BEFORE_IMPORT)
        if place is _BEFORE_IMPORT and not place:
            when_imported(_COMPILER, lambda module: None, during=_giving_way)
        place.append(self._start)

    def remove(self) -> None:
        """Stop watching."""
        place, self._place = self._place, None
        if place is not None and self._start in place:
            place.remove(self._start)


_BEFORE_IMPORT: list[Callable[..., Any]] = []


@contextmanager
def _giving_way() -> Iterator[None]:
    for start in list(_BEFORE_IMPORT):
        start()
    yield


_NAME = "wait"
_CONVERT_FRAME = "torch._dynamo.convert_frame"
_FUNCTIONAL, _WAIT = "torch.distributed._functional_collectives", "wait_tensor"


class StallHooks:
    """Stand-ins for waiting functions, between ``install`` and ``remove``."""

    def __init__(self, recorder: Recorder, guard: Guard) -> None:
        self._recorder = recorder
        self._begin = guard.protect(self._begin_at)
        self._end = guard.protect(recorder.end_stall)
        self._stand_ins = StandIns()
        self.remove = self._stand_ins.remove

    def install(self) -> None:
        """Install them; events are only covered if marks are a device's."""
        functional = sys.modules.get(_FUNCTIONAL)
        if functional is not None and not _has_compiled():
            self._put(functional, _WAIT, lambda *_, **__: self._begin(None))
        if not self._recorder.stopwatch.is_host:
            self._put(torch.cuda.Event, _NAME, self._begin_for)

    def _put(self, owner: Any, name: str, begin: Callable[..., Any]) -> None:
        self._stand_ins.put(owner, name, lambda original: self._wrap(original, begin))

    def _wrap(self, original: Any, begin: Callable[..., Any]) -> Any:
        def wait(*args: Any, **kwargs: Any) -> Any:
            is_begun = begin(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                if is_begun:
                    self._end()

        return wait

    def _begin_for(self, event: Any, stream: Any = None) -> bool | None:
        return self._begin(stream)

    def _begin_at(self, stream: Any) -> bool:
        recorder = self._recorder
        if recorder.log is None or not recorder.is_of_step:
            return False
        return recorder.stopwatch.is_of_step(stream) and recorder.begin_stall()


def _has_compiled() -> bool:
    """Return True if a frame of this process was compiled, or may have been in an unknown
    release."""
    compiler = sys.modules.get(_CONVERT_FRAME)
    return compiler is not None and getattr(compiler, "FRAME_COUNTER", 1) > 0
