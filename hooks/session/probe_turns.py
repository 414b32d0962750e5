"""When probes run: the session's side of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...calib.records.record_kinds import Record
from ..process.guard import Guard
from ..process.interpreter import is_installed
from ..process.looking import weights
from ..process.settings import Settings
from ..recording.window import StepPlan
from .ledger import Between

if TYPE_CHECKING:
    from ..probing.probes import Probing
    from ..process.host import Host

_log = logging.getLogger(__name__)
PROBE = "probe"


class ProbeTurns:
    """One turn before each step outside of windows; nothing is imported before the first.

    ``on_done`` is called once, a step after the last turn, or at the end of training.
    """

    def __init__(
        self,
        settings: Settings,
        guard: Guard,
        *,
        put: Callable[[Record], object],
        on_done: Callable[[], object],
        clock: Callable[[], int],
    ) -> None:
        self._settings, self._put, self._on_done, self._clock = settings, put, on_done, clock
        self._probing: Probing | None = None
        self._take_turn = guard.protect(self._take)
        self.is_over = settings.probe_s <= 0

    def before_step(
        self, host: Host | None, plan: StepPlan, between: Between, *, step: int, window: int
    ) -> None:
        """Run a slice of the probes where this is a moment for them, and bracket it."""
        if self.is_over or host is None or plan.window is not None:
            return
        if self._probing is not None and self._probing.is_done:
            self.finish()
            return
        start_ns = self._clock()
        if not self._take_turn(host, max(0, step), window):
            self.stop()
        between.extend(PROBE, start_ns, self._clock())

    def stop(self) -> None:
        """No more turns here, and no more collectives on any rank."""
        if not self.is_over and self._probing is not None:
            self._probing.abstain()
        self.is_over, self._probing = True, None  # it has buffers and groups

    def finish(self) -> None:
        """All that was measured has been handed over."""
        if not self.is_over and self._probing is not None:
            self.is_over, self._probing = True, None
            self._on_done()

    def _take(self, host: Host, step: int, window: int) -> bool:
        """One slice; False where there is nothing to probe here."""
        if self._probing is None:
            self._probing = self._begin(host)
        if self._probing is None:
            return False
        self._probing.run_slice(step, window)
        return True

    def _begin(self, host: Host) -> Probing | None:
        config = host.run_config() if host.run_config is not None else None
        weight = next(iter(weights(host.models)), None)
        if config is None or weight is None:
            return None
        if not is_installed("numpy"):
            if self._settings.rank.is_last:
                _log.warning("[forerun] no probes: NumPy is not installed here; pip install numpy")
            return None
        from ..probing.probes import Probing
        from .devices import why_no_marks
        from .instruments import stopwatch_for

        reason = why_no_marks(host.models)
        if reason:
            if self._settings.rank.is_last:
                _log.warning("[forerun] no probes: %s", reason)
            return None

        return Probing(
            config,
            self._settings,
            roles=host.roles,
            device=weight.device,
            stopwatch=stopwatch_for(host.models),
            put=self._put,
        )
