"""When the step's stream waits for another stream of its device: what runs there is exposed then.

``Stream.wait_stream`` and ``Stream.wait_event`` both call ``torch.cuda.Event.wait``, which has a
stand-in during hooked steps.  It queues a mark before the wait and one after it, where the stream
that waits is the step's own.
"""

from __future__ import annotations

from typing import Any

import torch

from ..process.guard import Guard
from ..process.stand_in import stand_in
from .recorder import Recorder

_NAME = "wait"


class StallHooks:
    """A stand-in for the wait for an event, between ``install`` and ``remove``."""

    def __init__(self, recorder: Recorder, guard: Guard) -> None:
        self._recorder = recorder
        self._begin = guard.protect(self._begin_at)
        self._end = guard.protect(recorder.end_stall)
        self._saved: tuple[type, Any, Any] | None = None

    def install(self) -> None:
        """Put it in, where marks are a device's."""
        owner = torch.cuda.Event
        original = vars(owner).get(_NAME)
        if self._saved is not None or original is None or self._recorder.stopwatch.is_host:
            return
        self._saved = owner, original, self._wrap(original)
        setattr(owner, _NAME, self._saved[2])

    def remove(self) -> None:
        """Put the original back; what another has put there meanwhile stays his."""
        saved, self._saved = self._saved, None
        if saved is not None and vars(saved[0]).get(_NAME) is saved[2]:
            setattr(saved[0], _NAME, saved[1])

    def _wrap(self, original: Any) -> Any:
        def wait(event: Any, *args: Any, **kwargs: Any) -> Any:
            is_begun = self._begin(args[0] if args else kwargs.get("stream"))
            try:
                return original(event, *args, **kwargs)
            finally:
                if is_begun:
                    self._end()

        return stand_in(original, wait)

    def _begin_at(self, stream: Any) -> bool:
        recorder = self._recorder
        if recorder.log is None or not recorder.is_of_step:
            return False
        return recorder.stopwatch.is_of_step(stream) and recorder.begin_stall()
