"""One session per training process: warm-up, window, watching; ties hooks, files and companion."""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..calib.samples.records import (
    SCHEMA,
    Header,
    PhaseRecord,
    RunRecord,
    StepFlag,
    StepRecord,
    WindowRecord,
)
from .between import Between
from .guard import Guard
from .live import Live
from .settings import Settings
from .window import StepPlan, WindowPlan
from .writer import RecordWriter, WindowEnd

if TYPE_CHECKING:
    from .host import Host
    from .instruments import Instruments
    from .recorder import StepLog

_log = logging.getLogger(__name__)
EVAL = "eval"
SAVE = "save-checkpoint"
PROBE = "probe"
_BRACKET_FLAGS = {
    EVAL: StepFlag.EVALUATED,
    SAVE: StepFlag.SAVED,
    PROBE: StepFlag.PROBED,
}


@dataclass(slots=True)
class _Step:
    """The step that is running."""

    number: int
    plan: StepPlan
    start_ns: int
    gap_ns: int
    flags: set[StepFlag]
    num_faults: int
    excluded_ns: int = 0
    hook_ns: int = 0


class Session:
    """What adapters call.  No method raises; after three faults all of them do nothing."""

    def __init__(
        self, settings: Settings, *, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.settings = settings
        self.guard = Guard(self._trip)
        self._clock = clock
        self._started_unix_s = time.time()
        self._plan = WindowPlan(steps=settings.steps, every=settings.every)
        self._host: Host | None = None
        self._instruments: Instruments | None = None
        self._live = Live(settings)
        self._writer = RecordWriter(
            settings.directory, self._header, self.guard, on_idle=self._live.poll
        )
        self._index = 0
        self._next = 0
        self._step: _Step | None = None
        self._between = Between()
        self._brackets: dict[str, int] = {}
        self._pending: list[StepLog] = []
        self._ending: WindowEnd | None = None
        self._first: int | None = None
        self._last = 0
        self._window = 0
        self._num_dropped = 0
        self._num_passes = 0
        self._is_finished = False
        protect = self.guard.protect
        self.begin_step = protect(self._begin_step)
        self.end_step = protect(self._end_step)
        self.begin_bracket = protect(self._begin_bracket)
        self.end_bracket = protect(self._end_bracket)
        self.finish = protect(self._finish)

    @property
    def is_in_step(self) -> bool:
        """True between ``begin_step`` and ``end_step``."""
        return self._step is not None

    def begin_phase(self, name: str) -> None:
        """A phase that the adapter itself brackets."""
        if self._instruments is not None:
            self._instruments.recorder.begin_phase(name)

    def end_phase(self, name: str) -> None:
        """The end of such a phase."""
        if self._instruments is not None:
            self._instruments.recorder.end_phase(name)

    def describe(self, host: Host) -> None:
        """What is trained here, as far as it is known by now; a later call replaces it."""
        self._host = host
        if self._instruments is not None and self._step is None:
            self._instruments = None

    def _begin_step(self, step: int | None = None) -> None:
        if self.guard.is_tripped or self._is_finished:
            return
        start_ns = self._clock()
        gap_ns = self._between.gap_ns(start_ns)
        flags = self._report_brackets()
        plan = self._plan.at(self._index)
        if plan.is_warmup:
            flags.add(StepFlag.WARMUP)
        number = self._next if step is None else step
        self._next, self._index = number + 1, self._index + 1
        self._step = _Step(number, plan, start_ns, gap_ns, flags, self.guard.num_faults)
        if self._index == 1:
            self._start()
        if plan.window is not None:
            self._watch_collector()
        if plan.is_hooked and plan.window is not None and self._host is not None:
            if self._instruments is None:
                from .instruments import Instruments

                self._instruments = Instruments(self._host, self.guard, num_passes=self._num_passes)
            self._instruments.put_on(step=number, window=plan.window)
            self._step.hook_ns += self._clock() - start_ns

    def _start(self) -> None:
        """On the first step: the run's description, and the companion where it belongs."""
        atexit.register(self._at_exit)
        self.guard.protect(self._live.start)()
        if self._host is not None and self._host.run_config is not None:
            config = self.guard.protect(self._host.run_config)()
            if config is not None:
                # Interleaving reorders the passes: forward n and backward n are not the same one.
                self._num_passes = config.num_microbatches if config.parallelism.vp == 1 else 0
                self._writer.put(RunRecord(config=config.to_json()))

    def _end_step(self, *, is_rerun: bool = False) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        done_ns = self._clock()
        log = self._instruments.take_off() if self._instruments and step.plan.is_hooked else None
        end_ns = self._clock()
        step.hook_ns += end_ns - done_ns if log is not None else 0
        self._between.end_ns = end_ns
        if log is not None:
            self._pending.append(log)
        if is_rerun or (log is not None and log.starts.get("forward-backward", 1) > 1):
            step.flags.add(StepFlag.RERAN)
        if self.guard.num_faults > step.num_faults:
            step.flags.add(StepFlag.FAULTED)
        plan = replace(step.plan, is_hooked=log is not None)
        self._report(step, plan, end_ns - step.start_ns - step.excluded_ns)
        self._drain()

    def _report(self, step: _Step, plan: StepPlan, duration_ns: int) -> None:
        flags = tuple(sorted(step.flags, key=lambda flag: flag.value))
        if plan.window is not None:
            self._window = plan.window
            if not plan.is_warmup:
                self._first = step.number if self._first is None else self._first
            self._last = step.number
            self._writer.put(
                StepRecord(
                    step=step.number,
                    window=plan.window,
                    start_ns=step.start_ns,
                    duration_ns=duration_ns,
                    gap_ns=step.gap_ns,
                    is_hooked=plan.is_hooked,
                    flags=flags,
                    hook_ns=step.hook_ns,
                )
            )
        self._live.step(step.number, plan, duration_ns, step.gap_ns, flags)
        if plan.is_last:
            self._end_window()

    def _end_window(self) -> None:
        self._unwatch_collector()
        if self._first is None:
            return
        window, last = self._window, self._last
        instruments = self._instruments
        self._ending = WindowEnd(
            record=WindowRecord(
                window=window,
                first_step=self._first,
                last_step=last,
                num_faults=self.guard.num_faults,
                num_dropped=self._num_dropped + self._writer.num_dropped,
                memory_peak_nbytes=instruments.memory_peak_nbytes() if instruments else 0,
                device_memory_nbytes=instruments.device_memory_nbytes() if instruments else 0,
            ),
            coverage=instruments.coverage(window) if instruments else (),
            on_written=lambda: self._live.window_closed(window, last),
        )
        self._first = None

    def _drain(self) -> None:
        """Hand on the steps whose marks can be read by now, then the window's end."""
        while self._pending and self._pending[0].resolve():
            log = self._pending.pop(0)
            self._num_dropped += log.num_dropped
            self._writer.put(log)
        if self._ending is not None and not self._pending:
            ending, self._ending = self._ending, None
            self._writer.put(ending)

    def _begin_bracket(self, name: str) -> None:
        self._brackets.setdefault(name, self._clock())

    def _end_bracket(self, name: str) -> None:
        start_ns = self._brackets.pop(name, None)
        if start_ns is None:
            return
        end_ns = self._clock()
        self._between.extend(name, start_ns, end_ns)
        if self._step is not None:
            # A loop of the user's own may evaluate or save before it says that a step has ended.
            self._step.excluded_ns += end_ns - max(start_ns, self._step.start_ns)
            self._step.flags |= self._report_brackets()

    def _report_brackets(self) -> set[StepFlag]:
        """Write down what lay between the steps; the flags that it puts on the next one."""
        brackets, self._between = self._between.brackets, Between()
        step = max(0, self._next - 1)
        for name, (start_ns, end_ns) in brackets.items():
            self._writer.put(
                PhaseRecord(
                    step=step,
                    window=self._window,
                    name=name,
                    microbatch=0,
                    start_ns=start_ns,
                    duration_ns=end_ns - start_ns,
                )
            )
            self._live.phase(name, step, end_ns - start_ns)
        return {_BRACKET_FLAGS[name] for name in brackets if name in _BRACKET_FLAGS}

    def _watch_collector(self) -> None:
        if self._on_collection not in gc.callbacks:
            gc.callbacks.append(self._on_collection)

    def _unwatch_collector(self) -> None:
        with suppress(ValueError):
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        # Young generations are collected in every step; only full collections stand out.
        if phase == "start" and info.get("generation") == 2 and self._step is not None:
            self._step.flags.add(StepFlag.COLLECTED)

    def _trip(self) -> None:
        """Three faults: everything off, what was recorded stays."""
        self._unwatch_collector()
        if self._instruments is not None:
            self._instruments.take_off()
        self._step = None

    def _finish(self) -> None:
        """Training is over: close an open window, write the rest, tell the companion."""
        if self._is_finished:
            return
        self._is_finished = True
        if self._step is not None and self._instruments is not None:
            self._instruments.take_off()
        self._unwatch_collector()
        self._report_brackets()
        if self._first is not None:
            self._end_window()
        self._drain()
        # What the device has not reached by now is given up: waiting would be a synchronisation.
        self._num_dropped += sum(len(log.what) for log in self._pending)
        self._pending.clear()
        self._drain()
        self._writer.close()
        self._live.end(max(0, self._next - 1))

    def _at_exit(self) -> None:
        self.finish()
        self._live.close()

    def _header(self) -> Header:
        rank, host = self.settings.rank, self._host
        return Header(
            schema=SCHEMA,
            run_id=rank.run_id,
            rank=rank.rank,
            world_size=rank.world_size,
            created_by=_created_by(),
            device=self._instruments.device if self._instruments else "cpu",
            started_unix_s=self._started_unix_s,
            stage=host.stage if host else 0,
            tp_rank=host.tp_rank if host else 0,
            dp_rank=host.dp_rank if host else 0,
        )


def _created_by() -> str:
    # Not an import: beside an editable installation, a records folder named like the package hides
    # the package's own __init__ from a script in the same directory.
    name = __name__.partition(".")[0]
    version = getattr(sys.modules.get(name), "__version__", "")
    return f"{name} {version}".strip()


_STATE: dict[str, Session] = {}


def start(settings: Settings) -> Session:
    """Begin this process's session and wait for a host; a second call changes nothing."""
    session = _STATE.get("session")
    if session is None:
        session = _STATE["session"] = Session(settings)
        from .adapters import megatron_core, megatron_training

        megatron_training.wait_for(session)
        megatron_core.wait_for(session)
    return session
