"""The instruments of one window: made for it from what lives then, and gone with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...calib.records.record_kinds import CoverageRecord, Record
from ...calib.workload.config import RunConfig
from ..process.guard import Guard
from ..process.host import Host, KnownHost

if TYPE_CHECKING:
    from .instruments import Instruments
    from .mark_budget import MarkBudget

_log = logging.getLogger(__name__)
GONE = "hooks: the model no longer exists"
"""Name in the coverage of a window that has step times alone."""


class Fitting:
    """Knows the host without keeping any of its objects alive; ``put`` takes remarks."""

    def __init__(self, guard: Guard, put: Callable[[Record], object]) -> None:
        self._guard = guard
        self._put = put
        self._known: KnownHost | None = None
        self._num_hooked = 0
        self._budget: MarkBudget | None = None
        self._gone_window = -1
        self.instruments: Instruments | None = None
        self.device = "cpu"
        self.config: RunConfig | None = None
        """What the host says that it trains, once it is known."""

    @property
    def host(self) -> Host | None:
        """What the host has told, without its objects."""
        return None if self._known is None else self._known.told

    def alive(self) -> Host | None:
        """The host with its objects, None where there is none or a model is gone; not to keep."""
        return None if self._known is None else self._known.alive()

    def describe(self, host: Host) -> None:
        """Who is hooked from the next window on."""
        self._known = KnownHost(host)

    def put_on(
        self,
        *,
        step: int,
        window: int,
        microbatches: tuple[int, ...],
        num_steps: int,
        has_operators: bool,
        num_local_ranks: int,
        step_s: float,
    ) -> Instruments | None:
        """Everything that a hooked step has; None, and said, where the model is gone."""
        if self._known is None:
            return None
        if self._known.alive() is None:
            self._say_gone(window)
            return None
        if self.instruments is None:
            from .instruments import Instruments

            self.instruments = Instruments(
                self._known,
                self._guard,
                microbatches=microbatches,
                num_steps=num_steps,
                num_hooked=self._num_hooked,
                step_s=step_s,
                budget=self._budget,
                has_operators=has_operators,
                num_local_ranks=num_local_ranks,
                config=self.config,
            )
            self.device = self.instruments.device
        self.instruments.put_on(step=step, window=window)
        return self.instruments

    def _say_gone(self, window: int) -> None:
        self.drop()
        if self._gone_window != window:
            self._gone_window = window
            _log.warning("[forerun] window %d has only step times; %s", window, GONE)
            self._put(CoverageRecord(window=window, name=GONE, installed=0, fired=0))

    def drop(self) -> None:
        """Let go of buffers, events and what was found in the model; hooks must be off."""
        if self.instruments is not None:
            self._num_hooked = self.instruments.num_hooked
            self._budget = self.instruments.budget
            self.instruments = None

    def forget(self) -> None:
        """Other objects will be trained."""
        self._known = self.instruments = self.config = self._budget = None
        self._num_hooked = 0
