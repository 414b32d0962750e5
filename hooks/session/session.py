"""One session per training process: warm-up, window, watching; connects hooks, files and
companion."""

from __future__ import annotations

import atexit
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ...calib.records.record_kinds import Header, LoopRecord, RunRecord, StepFlag
from ...calib.units import NS_PER_S
from ...calib.workload.recording import RecordingDetail
from ..control.live import Live
from ..control.orders import Orders
from ..process.events import CollectionWatch, in_forked_child
from ..process.guard import Guard
from ..process.host import Reference, reference
from ..process.inspection import forked_rng
from ..process.node_topology import NodeTopology
from ..process.ranks import rank_in_training
from ..process.settings import RESTART_WINDOWS, Settings
from ..process.stand_ins import pass_over_package
from ..recording.exchange import RecordingRole
from ..recording.window import NUM_WARMUP_STEPS, StepPlan, WindowPlan, pass_microbatches
from ..recording.writer import RecordWriter, header_of
from ._ledger import Ledger, OpenStep, StepGap
from ._trace_turns import PROBE, InstrumentManager, ProbeScheduler, Tracing

if TYPE_CHECKING:
    from ..process.host import Host

_log = logging.getLogger(__name__)
EVAL = "eval"
SAVE = "save-checkpoint"
_BRACKET_FLAGS = {
    EVAL: StepFlag.EVALUATED,
    SAVE: StepFlag.SAVED,
    PROBE: StepFlag.PROBED,
}


class Session:
    """Interface for adapters.  No method raises; after three faults all of them do nothing."""

    def __init__(self, settings: Settings) -> None:
        self.guard = Guard(self._take_all_off)
        self._clock = time.perf_counter_ns
        self._started_unix_s = time.time()
        self._owner: Reference | None = None  # weak: a callback may reference the framework's model
        self._on_training: Callable[[], object] | None = None
        self._is_described = False
        self._index = 0
        self._next = 0
        self._least_step_s = math.inf
        self._step: OpenStep | None = None
        self.is_in_step = False
        """True between ``begin_step`` and ``end_step``."""
        self._between = StepGap()
        self._collections = CollectionWatch(self._note_collection)
        self._brackets: dict[str, int] = {}
        self._microbatches: tuple[int, ...] = ()
        self._num_restarts = 0
        self._has_started = False
        self._is_finished = False
        self._build(settings)

    def _build(self, settings: Settings) -> None:
        """Make all parts that depend on the rank."""
        self.settings = settings
        self._plan = WindowPlan(steps=settings.steps, every=settings.every)
        self._live = Live(settings)
        self._orders = Orders(settings, self.guard, self._live.orders, self._live.launch_id)
        self._duty = RecordingRole(settings)
        self._node_topology = NodeTopology(settings.rank, os.environ, settings.nodes)
        self._writer = self._new_writer()
        self._fitting = InstrumentManager(self.guard, self._writer.put)
        self._ledger = Ledger(self._writer, self.guard, self._live.send_event)
        self._probes = ProbeScheduler(
            settings,
            self.guard,
            put=self._writer.put,
            on_done=partial(self._ledger.send_window_event, "probed"),
            clock=self._clock,
        )
        self._length = RunLength(settings)
        self._tracing = Tracing(settings.trace, self._writer.put)
        self._protect_entry_points()

    def settle_at_training(self, on_training: Callable[[], object]) -> None:
        """Take the rank that ``torch.distributed`` tells once training begins, then call this."""
        self._on_training = on_training

    def _settle(self) -> None:
        on_training, self._on_training = self._on_training, None
        if on_training is None:
            return
        rank = rank_in_training(self.settings.rank, os.environ, is_forked=not self.guard.is_home)
        if rank is None:
            self.switch_off()
            return
        if rank != self.settings.rank:
            self._build(replace(self.settings, rank=rank))
        on_training()

    def _new_writer(self) -> RecordWriter:
        return RecordWriter(
            self.settings.directory,
            self._header,
            self.guard,
            on_idle=self._live.poll,
            on_end=self._live.settle,
            exchange=self._duty.exchange,
        )

    def _protect_entry_points(self) -> None:
        """Protect the methods that adapters call."""
        protect = self.guard.protect
        self.begin_step = protect(self._begin_step)
        self.end_step = protect(self._end_step)
        self.begin_phase = protect(self._begin_phase)
        self.end_phase = protect(self._end_phase)
        self.begin_bracket = protect(self._begin_bracket)
        self.end_bracket = protect(self._end_bracket)
        self.abandon = protect(self._abandon)
        self.restart = protect(self._restart)
        self.finish = protect(self._finish)
        self.report_loop = protect(self._report_loop)
        self.should_stop = protect(self._orders.ask)

    def _begin_phase(self, name: str) -> None:
        """Begin a phase that the adapter itself marks."""
        if self._fitting.instruments is not None:
            self._fitting.instruments.recorder.begin_phase(name)

    def _end_phase(self, name: str) -> None:
        """End such a phase."""
        if self._fitting.instruments is not None:
            self._fitting.instruments.recorder.end_phase(name)

    def claim(self, adapter: object) -> bool:
        """Return True if this adapter's loop is the observed one, which is the first to call."""
        self.guard.protect(self._settle)()
        if self._is_finished and not self._has_started:
            return False
        if self._owner is None and self._fitting.host is None:
            self._owner = reference(adapter)
        return self._owner is not None and self._owner() is adapter

    @property
    def is_claimed(self) -> bool:
        """True if an adapter has claimed the session for its own loop."""
        return self._owner is not None

    def describe(self, host: Host) -> None:
        """Set the host as known by now; a later call replaces it."""
        self.guard.protect(self._settle)()
        self._fitting.describe(host)
        self._orders.describe(host)
        if self._step is None:
            self._fitting.drop()
        if self._index < self._plan.num_warmup:
            from ..sensors.captured import find_regions

            num_warmup = max(NUM_WARMUP_STEPS, find_regions(host.models).warmup_steps)
            self._plan = replace(self._plan, num_warmup=num_warmup)

    def switch_off(self) -> None:
        """Disable everything before the first step: no hooks, files, processes or messages."""
        self._is_finished = True
        self._orders.is_wanted = False

    def _begin_step(self, step: int | None = None) -> None:
        self.guard.enter()
        # Counted first, regardless of faults: ranks agree on actions by step number.
        last, number = self._next - 1, self._next if step is None else step
        self._next, self.is_in_step = number + 1, True
        is_opening = self._orders.begin_step(number)
        if self.guard.is_tripped or self._is_finished:
            return
        if is_opening:
            self._plan = self._plan.opened_at(self._index)
        if not self._probes.is_over:
            self._probe(last)
        start_ns = self._clock()
        gap_ns = self._between.gap_ns(start_ns)
        flags = self._report_brackets(last)
        plan = self._plan.at(self._index)
        if plan.window is not None and self._num_restarts:
            plan = replace(plan, window=plan.window + self._num_restarts * RESTART_WINDOWS)
        if plan.is_warmup:
            flags.add(StepFlag.WARMUP)
        self._index += 1
        self._step = OpenStep(number, plan, start_ns, gap_ns, flags, self.guard.num_training_faults)
        if not self._has_started:
            self._has_started = True
            self._start()
        self._describe_run()
        if plan.window is not None:
            self._collections.begin()
        if plan.is_hooked:
            self._decide()
        if self._step is not None:  # a fault above removes everything
            self._put_on(self._step)

    def _probe(self, last: int) -> None:
        host = self._fitting.alive()
        planned, window = self._plan.at(self._index), self._ledger.window
        self._probes.before_step(host, planned, self._between, step=last, window=window)

    def _put_on(self, step: OpenStep) -> None:
        """Install hooks, or the profiler, as planned for this step."""
        plan = step.plan
        if plan.is_hooked and plan.window is not None and self._fitting.host is not None:
            instruments = self._fitting.put_on(
                step=step.number,
                window=plan.window,
                microbatches=self._microbatches,
                num_steps=self._plan.num_hooked,
                has_operators=self._duty.part is RecordingDetail.OPERATORS,
                num_local_ranks=self.settings.rank.local_world_size,
                step_s=self._least_step_s,
            )
            if instruments is not None:
                num_traced = int(self._tracing.is_wanted(instruments))
                self._plan = replace(self._plan, num_traced=num_traced)
            step.hook_ns += self._clock() - step.start_ns
        if plan.is_traced and self._duty.part is RecordingDetail.OPERATORS:
            step.flags |= self._tracing.begin(
                self._fitting.instruments, step=step.number, window=plan.window or 0
            )

    def _start(self) -> None:
        """Open the companion link on the rank that hosts it, on the first step; the writer starts
        it."""
        atexit.register(self._at_exit)
        in_forked_child(self, Session._leave)
        self.guard.protect(self._live.start)(self._fitting.host)
        self._writer.wake()
        pass_over_package()

    def _describe_run(self) -> None:
        """Record the run's configuration, once the host has one."""
        host = self._fitting.host
        if self._is_described or host is None or host.run_config is None:
            return
        self._is_described = True
        with forked_rng():
            config = self.guard.protect(host.run_config)()
        self._duty.describe(config)
        if config is not None:
            total = self._length.steps(config.cadence.train_iters)
            config = replace(config, cadence=replace(config.cadence, train_iters=total))
        self._fitting.config = config
        if config is not None:
            self._microbatches = self.guard.protect(pass_microbatches)(config) or ()
            self._writer.put(RunRecord(config=config.to_json()))
            self._decide()

    def _report_loop(self, loop: LoopRecord) -> None:
        """Record the observations of the first steps, with the run length that the user states."""
        self._writer.put(replace(loop, num_steps=self._length.steps(loop.num_steps)))

    def _decide(self) -> None:
        """Choose the recording ranks of a large world, before the first hooked step."""
        plan = self._duty.decide(is_home=self._fitting.host.is_home if self._fitting.host else None)
        if plan is not None:
            self._writer.put(plan)

    def _end_step(self, *, is_rerun: bool = False) -> None:
        self._orders.end_step(self._next - 1)
        self.is_in_step = False
        step, self._step = self._step, None
        if step is None:
            return
        done_ns = self._clock()
        log = None
        if self._fitting.instruments is not None and step.plan.is_hooked:
            take_off = self.guard.protect(self._fitting.instruments.take_off)
            log = take_off() or take_off()  # retry what a fault has left installed
        if step.plan.is_traced:
            self._tracing.end()
        end_ns = self._clock()
        step.hook_ns += end_ns - done_ns if log is not None else 0
        self._between.end_ns = end_ns
        if log is not None:
            self._ledger.add_log(log)
        if is_rerun or (log is not None and log.starts.get("forward-backward", 1) > 1):
            step.flags.add(StepFlag.RERAN)
        is_given_up = step.plan.is_hooked and self._fitting.instruments is not None and log is None
        if is_given_up or self.guard.num_training_faults > step.num_faults:
            step.flags.add(StepFlag.FAULTED)
        plan = replace(step.plan, is_hooked=log is not None)
        duration_ns = end_ns - step.start_ns - step.excluded_ns
        if duration_ns < 0 or step.hook_ns < 0:
            # The clock has jumped back: the step's time is unknown.
            step.flags.add(StepFlag.FAULTED)
            duration_ns, step.hook_ns = max(0, duration_ns), max(0, step.hook_ns)
        self._report(step, plan, duration_ns)
        if self._index > 1:  # the first step connects and compiles
            self._least_step_s = min(self._least_step_s, duration_ns / NS_PER_S)
        self._ledger.drain(step_s=duration_ns / NS_PER_S)

    def _report(self, step: OpenStep, plan: StepPlan, duration_ns: int) -> None:
        if plan.window is not None:
            record = step.record(plan.window, duration_ns, is_hooked=plan.is_hooked)
            self._ledger.add_step(record, is_warmup=plan.is_warmup)
        self._live.step(step.number, plan, duration_ns, step.gap_ns, step.sorted_flags)
        if plan.is_last:
            self._end_window()

    def _end_window(self) -> None:
        self._collections.end()
        self._ledger.end_window(self._fitting.instruments)
        self._fitting.drop()
        if not self._is_finished:  # from Python 3.12 on no thread starts while a process ends
            self._orders.listen()

    def _begin_bracket(self, name: str) -> None:
        self._brackets.setdefault(name, self._clock())

    def _end_bracket(self, name: str) -> None:
        start_ns = self._brackets.pop(name, None)
        if start_ns is None:
            return
        end_ns = self._clock()
        self._between.extend(name, start_ns, end_ns)
        if self._step is not None:
            # A user's own loop may evaluate or save before it ends a step.
            self._step.excluded_ns += end_ns - max(start_ns, self._step.start_ns)
            self._step.flags |= self._report_brackets(self._next - 1)

    def _report_brackets(self, last: int) -> set[StepFlag]:
        """Record the brackets after step ``last``; return their flags for the next step."""
        brackets, self._between = self._between.brackets, StepGap()
        step = max(0, last)
        self._ledger.add_brackets(brackets, step)
        for name, (start_ns, end_ns) in brackets.items():
            time_s = (end_ns - start_ns) * 1e-9
            self._live.send_event("phase", name=name, time_s=time_s, step=step)
        return {_BRACKET_FLAGS[name] for name in brackets if name in _BRACKET_FLAGS}

    def _note_collection(self) -> None:
        if self._step is not None:
            self._step.flags.add(StepFlag.COLLECTED)

    def _abandon(self) -> None:
        """Remove everything: the running step will not end; earlier steps remain."""
        self.is_in_step = False
        self._take_all_off()

    def _take_all_off(self) -> None:
        self._collections.end()
        self._probes.stop()
        self._tracing.end(is_recorded=False)
        if self._fitting.instruments is not None:
            self._fitting.instruments.take_off()
        self._step = None

    def _restart(self) -> None:
        """Reset for another training in this process: no state of the earlier loop, a new
        warm-up."""
        self._abandon()
        self._fitting.forget()
        self._ledger.forget()
        self._between, self._brackets = StepGap(), {}
        self._is_described = False
        self._index = 0
        self._num_restarts += 1

    def _finish(self) -> None:
        """Finish training: close an open window, write the rest, notify the companion."""
        if self._is_finished:
            return
        self._is_finished = True
        self._tracing.end(is_recorded=False)
        if self._step is not None and self._fitting.instruments is not None:
            self._fitting.instruments.take_off()
        self._collections.end()
        self._report_brackets(self._next - 1)
        if self._ledger.is_open:
            self._end_window()
        self._ledger.drain()
        self._ledger.give_up()
        self._ledger.drain()
        self._writer.close()
        self._orders.close()
        self._probes.finish()
        self._fitting.drop()
        self._live.send_event("end", step=max(0, self._next - 1), unix_s=time.time())

    def _at_exit(self) -> None:
        self.finish()
        self._live.close()

    def _leave(self) -> None:
        """Disconnect a forked child, which is not training, from hooks, files and companion."""
        self._is_finished = True
        self._writer.leave()
        self._orders.leave()
        self._live.leave()
        if self._fitting.instruments is not None:
            self._fitting.instruments.take_off()
        self._step = None

    def _header(self) -> Header:
        return header_of(
            self.settings.rank,
            self._fitting.host,
            device=self._fitting.device,
            started_unix_s=self._started_unix_s,
            cluster=self.guard.protect(self._node_topology.cluster_json)(),
        )


_STATE: dict[str, Session] = {}


def running() -> Session | None:
    """Return the session that a flag started in this process."""
    return _STATE.get("session")


def begin(settings: Settings, on_training: Callable[[], object]) -> Session | None:
    """Return this process's new session; None if there is one already."""
    if "session" in _STATE:
        return None
    session = _STATE["session"] = Session(settings)
    session.settle_at_training(on_training)
    return session


class RunLength:
    """Choice between ``--calibrate-total-steps`` and the host's number, which takes precedence."""

    def __init__(self, settings: Settings) -> None:
        self._stated_steps = settings.total_steps or 0
        self._hint = settings.cadence.train_iters or 0
        self._is_silent = settings.rank.rank != 0

    def steps(self, reported_steps: int) -> int:
        """Return the steps of the whole run, given the host's number (0: none); 0 if unknown.

        The host's own arguments count as its number.  Logs once, on one rank, that the user's
        number is not used.
        """
        reported_steps = reported_steps or self._hint
        if reported_steps and self._stated_steps not in (0, reported_steps) and not self._is_silent:
            self._is_silent = True
            _log.warning(
                "[forerun] --calibrate-total-steps=%d is ignored: the training loop reports that "
                "the run has %d steps; leave the flag out",
                self._stated_steps,
                reported_steps,
            )
        return reported_steps or self._stated_steps
