"""What the first steps show of a loop that nobody describes: its model, batch and length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...calib.records.record_kinds import LoopRecord
from ..process.host import Host, living, reference, references
from .chain import is_split
from .data_watch import DataWatch
from .first_step import FirstStep, Known
from .session import Session

MakeHost = Callable[[Any, tuple[Any, ...], Callable[[], Any]], Host]
"""The host of an optimizer, of the modules around its parameters, and of what describes the run."""


class LoopSight:
    """Describes the run after its first step, and tells of its loop once ``data`` have shown it.

    Nothing of the user's is kept alive.  ``data`` is told of steps by who installed it.  Without
    ``sees_calls`` no hook is on the model: the batch is that of the loader.
    """

    def __init__(
        self,
        session: Session,
        optimizer: Any,
        chain: tuple[Any, ...],
        known: Known,
        make_host: MakeHost,
        data: DataWatch | None = None,
        *,
        sees_calls: bool = True,
    ) -> None:
        self._session, self._known, self._make_host = session, known, make_host
        self._optimizer, self._chain = reference(optimizer), references(chain)
        self._data = data
        self._loop: LoopRecord | None = None
        self._is_split = False
        self._first: FirstStep | None = FirstStep(chain if sees_calls else (), session.guard)

    @property
    def is_over(self) -> bool:
        """There is nothing more to be seen."""
        return self._first is None and self._loop is None

    def end_step(self) -> None:
        """The optimizer has stepped."""
        if self._first is not None:
            self._describe(self._first)
        if self._loop is not None and (self._data is None or self._data.is_over):
            self._tell(self._loop)

    def close(self) -> None:
        """Take away what is left, and tell what is known so far."""
        first, self._first = self._first, None
        if first is not None:
            first.close()
        if self._loop is not None:
            self._tell(self._loop)
        if self._data is not None:
            self._data.remove()

    def _describe(self, first: FirstStep) -> None:
        self._first = None
        first.close()
        chain, optimizer = living(self._chain), self._optimizer()
        rank = self._session.settings.rank
        self._loop, self._is_split = first.loop(chain, self._known), is_split(chain)
        config = None
        if optimizer is not None:
            config = first.run_config(chain, optimizer, rank, self._known)
        if config is not None:
            self._session.describe(self._make_host(optimizer, chain, lambda: config))

    def _tell(self, loop: LoopRecord) -> None:
        self._loop = None
        if self._data is not None:
            seen = self._data.seen()
            self._data.remove()
            loop = replace(loop, data=seen.length, pass_end=seen.end, pass_steps=seen.steps)
            if not (loop.samples or self._is_split):
                loop = replace(loop, samples=seen.samples, tokens=seen.tokens)
        self._session.tell_loop(loop)
