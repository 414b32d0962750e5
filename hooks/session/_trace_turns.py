"""Turns of trace, hooks and probes.

The profiler belongs to the process: if anything else is profiled, no step is traced, and the reason
is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...calib.marks.traced_step import COVERAGE
from ...calib.records.record_kinds import CoverageRecord, Record, StepFlag
from ...calib.workload.config import RunConfig
from ...calib.workload.run_options import AutoSwitch
from ...leaves import leaf
from ..process.guard import Guard
from ..process.host import Host, WeakHost
from ..process.inspection import weights
from ..process.interpreter import is_installed
from ..process.settings import Settings
from ..recording.window import StepPlan
from ._ledger import StepGap

if TYPE_CHECKING:
    from ..probing.probes import Probing
    from ..process.host import Host
    from ..recording.kineto import Tracer
    from ..recording.writer import ExportedStep
    from ._mark_budget import MarkBudget
    from .instruments import Instruments


class Tracing:
    """At most one traced step at a time; ``put`` takes what goes to the rank's file."""

    def __init__(
        self, choice: AutoSwitch, put: Callable[[CoverageRecord | ExportedStep], bool]
    ) -> None:
        self._choice = choice
        self._put = put
        self._tracer: Tracer | None = None
        self._instruments: Instruments | None = None
        self._window = 0

    def is_wanted(self, instruments: Instruments) -> bool:
        """Return True if the window has a traced step, the same on all ranks of a run."""
        if self._choice is AutoSwitch.AUTO:
            return instruments.is_traceable
        return self._choice is AutoSwitch.ON

    def begin(self, instruments: Instruments | None, *, step: int, window: int) -> set[StepFlag]:
        """Trace this step and return its flag; or no flag, with the reason in the coverage."""
        if instruments is None:
            return set()
        from ..recording.kineto import Tracer, reason_against

        is_device = instruments.device != "cpu"
        reason = reason_against(step, is_device=is_device, is_graphed=instruments.is_graphed)
        if reason:
            self._skip(reason, window)
            return set()
        self._instruments, self._window = instruments, window
        self._tracer = Tracer(instruments.recorder, is_device=is_device)
        self._tracer.begin()
        instruments.put_on(step=step, window=window, is_traced=True)
        return {StepFlag.TRACED}

    def end(self, *, is_recorded: bool = True) -> None:
        """Stop the profiler after the step, remove the hooks, and hand the trace to the writer."""
        tracer, self._tracer = self._tracer, None
        instruments, self._instruments = self._instruments, None
        traced = None
        try:
            traced = tracer.end(is_recorded=is_recorded) if tracer is not None else None
        except (OSError, RuntimeError) as err:
            self._skip(f"it cannot be exported ({err})", self._window)
        finally:
            if instruments is not None:
                instruments.take_off()
        if traced is not None and not self._put(traced):
            traced.discard()

    def _skip(self, reason: str, window: int) -> None:
        self._put(CoverageRecord.remark(window, f"{COVERAGE} skipped: {reason}"))


_log = logging.getLogger(__name__)
GONE = "hooks: the model no longer exists"
"""Name in the coverage of a window that has step times alone."""


class InstrumentManager:
    """Access to the host without keeping its objects alive; ``put`` takes remarks."""

    def __init__(self, guard: Guard, put: Callable[[Record], object]) -> None:
        self._guard = guard
        self._put = put
        self._known: WeakHost | None = None
        self._num_hooked = 0
        self._budget: MarkBudget | None = None
        self._gone_window = -1
        self.instruments: Instruments | None = None
        self.device = "cpu"
        self.config: RunConfig | None = None
        """The host's configuration, once known."""

    @property
    def host(self) -> Host | None:
        """The host as described, without its objects."""
        return None if self._known is None else self._known.detached_host

    def alive(self) -> Host | None:
        """Return the host with its objects, not to be stored; None without a host or if a model is
        gone."""
        return None if self._known is None else self._known.alive()

    def describe(self, host: Host) -> None:
        """Set the host to hook from the next window on; records name its device from now on."""
        self._known = WeakHost(host)
        from .devices import name_if_started

        self.device = self._guard.protect(name_if_started)(host.models) or self.device

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
        """Install the hooks of a hooked step; None, with a log message, if the model is gone."""
        if self._known is None:
            return None
        if self._known.alive() is None:
            self._report_gone(window)
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

    def _report_gone(self, window: int) -> None:
        self.drop()
        if self._gone_window != window:
            self._gone_window = window
            _log.warning("[forerun] window %d has only step times; %s", window, GONE)
            self._put(CoverageRecord.remark(window, GONE))

    def drop(self) -> None:
        """Release buffers, events and sites; hooks must be off."""
        if self.instruments is not None:
            self._num_hooked = self.instruments.num_hooked
            self._budget = self.instruments.budget
            self.instruments = None

    def forget(self) -> None:
        """Reset for training of other objects."""
        self._known = self.instruments = self.config = self._budget = None
        self._num_hooked = 0


PROBE = "probe"


class ProbeScheduler:
    """Scheduler of one turn before each step outside of windows; imports nothing before the first.

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
        self, host: Host | None, plan: StepPlan, between: StepGap, *, step: int, window: int
    ) -> None:
        """Run and bracket a slice of the probes if the plan allows it."""
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
        """End turns on this rank, and collectives on all ranks."""
        if not self.is_over and self._probing is not None:
            self._probing.abstain()
        self.is_over, self._probing = True, None  # releases buffers and groups

    def finish(self) -> None:
        """Report that all measurements have been passed on."""
        if not self.is_over and self._probing is not None:
            self.is_over, self._probing = True, None
            self._on_done()

    def _take(self, host: Host, step: int, window: int) -> bool:
        """Run one slice; False if there is nothing to probe."""
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
        probing: Any = leaf("..probing.probes:Probing", __package__ or "")
        if probing is None:
            return None
        from .devices import why_no_marks
        from .instruments import stopwatch_for

        reason = why_no_marks(host.models)
        if reason:
            if self._settings.rank.is_last:
                _log.warning("[forerun] no probes: %s", reason)
            return None

        return probing(
            config,
            self._settings,
            roles=host.roles,
            device=weight.device,
            stopwatch=stopwatch_for(host.models),
            put=self._put,
        )
