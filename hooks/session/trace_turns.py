"""The traced step of a window: begun where it is wanted and harmless, read in a thread of its own.

The profiler belongs to the process: whatever else is profiled, this stands down and says why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...calib.records.record_kinds import CoverageRecord, Record, StepFlag
from ...calib.workload.run_options import TraceChoice
from ..process.guard import OWN_THREAD, Guard

if TYPE_CHECKING:
    from ..recording.kineto import Tracer
    from ..recording.traced import TracedStep
    from .instruments import Instruments

COVERAGE = "trace"
_TIMEOUT_S = 20.0


class Tracing:
    """At most one traced step at a time; ``put`` takes records from any thread."""

    def __init__(self, choice: TraceChoice, guard: Guard, put: Callable[[Record], bool]) -> None:
        self._choice = choice
        self._guard = guard
        self._put = put
        self._tracer: Tracer | None = None
        self._instruments: Instruments | None = None
        self._thread: threading.Thread | None = None

    def is_wanted(self, instruments: Instruments) -> bool:
        """True where the window has a traced step: the same on all ranks of a run."""
        if self._choice is TraceChoice.AUTO:
            return instruments.is_traceable
        return self._choice is TraceChoice.ON

    @property
    def is_reading(self) -> bool:
        """True while records of a traced step are still to come."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, instruments: Instruments | None, *, step: int, window: int) -> set[StepFlag]:
        """Trace this step and flag it; or no flag, and the reason against it in the coverage."""
        if instruments is None:
            return set()
        from ..recording.kineto import Tracer, reason_against

        is_device = instruments.device != "cpu"
        reason = reason_against(step, is_device=is_device, is_graphed=instruments.is_graphed)
        if reason:
            self._say(window, f"{COVERAGE} skipped: {reason}")
            return set()
        self._instruments = instruments
        self._tracer = Tracer(instruments.recorder, is_device=is_device)
        self._tracer.begin()
        instruments.put_on(step=step, window=window, is_traced=True)
        return {StepFlag.TRACED}

    def end(self, *, is_kept: bool = True) -> None:
        """The step is over: stop the profiler, take the hooks off, read elsewhere what is kept."""
        tracer, self._tracer = self._tracer, None
        instruments, self._instruments = self._instruments, None
        try:
            traced = tracer.end() if tracer is not None else None
        finally:
            if instruments is not None:
                instruments.take_off()
        if traced is not None and is_kept:
            read = self._guard.protect(self._read)
            self._thread = threading.Thread(
                target=read, args=(traced,), name=f"{OWN_THREAD}trace", daemon=True
            )
            self._thread.start()

    def finish(self) -> None:
        """The process ends: stop what runs, and wait for what is being read."""
        self.end(is_kept=False)
        if self._thread is not None:
            self._thread.join(_TIMEOUT_S)

    def _read(self, traced: TracedStep) -> None:
        records = traced.records()
        for record in records:
            self._put(record)
        window = traced.log.window
        if traced.problem:
            self._say(window, f"{COVERAGE}: {traced.problem}")
        else:
            self._put(CoverageRecord(window=window, name=COVERAGE, installed=1, fired=1))
        if traced.remark:
            self._say(window, f"{COVERAGE}: {traced.remark}")

    def _say(self, window: int, name: str) -> None:
        """A remark: it has no hooks that could fire, and so does not count as coverage."""
        self._put(CoverageRecord(window=window, name=name, installed=0, fired=0))
