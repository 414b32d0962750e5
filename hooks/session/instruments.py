"""All hooks of a hooked step, installed before it and removed after it."""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Any

import torch

from ...calib.marks.step_marks import coverage_name
from ...calib.records.record_kinds import CoverageRecord
from ...calib.workload.config import RunConfig
from ...calib.workload.operators import OperatorKind
from ..process.guard import Guard
from ..process.host import WeakHost
from ..process.stand_ins import pass_over_package
from ..recording.flight_recorder import COLLECTIVES, FlightRecorder
from ..recording.kineto import traced_samples
from ..recording.window import layer_weights, samples
from ..sensors.captured import find_regions, graphs_remark, why_no_operators
from ..sensors.compiling import CompileWatch, StallHooks
from ..sensors.dispatches import DispatchHooks
from ..sensors.modules import ModuleHooks
from ..sensors.passes import PassHooks
from ..sensors.process_groups import GroupRoles, ProcessGroupHooks
from ..sensors.recorder import Recorder
from ..sensors.step_log import MAX_MARKS, MAX_WINDOW_MARKS, StepLog
from ..sensors.stopwatch import Stopwatch
from ..sensors.timers import TimerHooks
from ._mark_budget import MarkBudget, count_chosen
from .devices import (
    computing_device,
    memory_nbytes,
    name_of,
    peak_nbytes,
    stopwatch_on,
    why_no_marks,
)

_STRANGE = "operators not recorded: the layers of the model are of no known library"


class Instruments:
    """The hooks of one training process, off unless a step is being hooked.

    ``microbatches[k]`` is the micro-batch of pass k, as far as known; a window has at most
    ``num_steps`` hooked steps, which share the recorder's memory; ``num_hooked`` were hooked before
    it, and are in ``budget``.  A step is expected to take ``step_s``.  Without ``has_operators``
    only phases and collectives are recorded.  No host object is kept alive; a host whose model no
    longer exists raises ``ReferenceError``.
    """

    def __init__(
        self,
        host: WeakHost,
        guard: Guard,
        *,
        microbatches: tuple[int, ...] = (),
        num_steps: int = 1,
        num_hooked: int = 0,
        step_s: float = math.inf,
        budget: MarkBudget | None = None,
        has_operators: bool = True,
        num_local_ranks: int = 1,
        config: RunConfig | None = None,
    ) -> None:
        living_host = host.alive()
        if living_host is None:
            raise ReferenceError("the model is gone")
        self._host = host
        self._guard = guard
        self._optimizer = host.optimizer(config)
        self.num_hooked = num_hooked
        self._num_local_ranks = num_local_ranks
        self._microbatches = microbatches
        self._num_steps, self._step_s = max(1, num_steps), step_s
        self._max_marks = min(MAX_MARKS, MAX_WINDOW_MARKS // self._num_steps)
        self._place = _device(living_host.models)
        self.device = device_name(living_host.models)
        self.recorder = Recorder(stopwatch_for(living_host.models))
        reasons = (why_no_operators(living_host.models), why_no_marks(living_host.models))
        self._remarks = tuple(reason for reason in reasons if reason)
        has_operators = has_operators and not self._remarks
        self._modules = ModuleHooks(
            living_host.models if has_operators else (), self.recorder, guard
        )
        self._is_strange = has_operators and not (self._modules.sites or self._modules.unseen)
        self._dispatches = DispatchHooks(living_host.models, self.recorder, guard)
        self.budget = budget or MarkBudget(num_sites=len(self._modules.sites))
        self._stalls = StallHooks(self.recorder, guard)
        self._regions = find_regions(living_host.models)
        roles = GroupRoles(
            host.detached_host.roles, config.parallelism if config is not None else None
        )
        self.flight = FlightRecorder(unseen=host.detached_host.unseen, roles=roles)
        self._timers = TimerHooks(self.recorder, guard)
        self._passes = PassHooks(
            living_host.passes, self.recorder, guard, drop_marks=self._drop_marks
        )
        self._compiling = CompileWatch(guard.protect(self._give_way))
        protect = guard.protect
        self._close, self._end_flight = protect(self.recorder.close), protect(self.flight.end_step)
        self._learn = protect(self._learn_from)
        self._num_compiled = 0
        self._called: set[int] = set()
        self._watched: set[int] = set()
        self._unlearned: list[StepLog] = []
        pass_over_package()
        self._has_timers = bool(living_host.timer_holders or living_host.passes)
        self._groups = (
            ProcessGroupHooks(self.recorder, guard, roles)
            if torch.distributed.is_available()
            else None
        )

    @property
    def is_graphed(self) -> bool:
        """True if parts of the model are replayed as CUDA graphs."""
        return self._regions.is_graphed

    @property
    def is_traceable(self) -> bool:
        """True if a trace shows operators of an accelerator, the same on all ranks."""
        return self._place.type == "cuda" and not self._remarks

    def _give_way(self) -> None:
        """Remove everything until the end of the step: a compiler is about to read the process."""
        self._num_compiled += self.recorder.close() is not None
        self._drop_marks()
        self._remove(*self._hooks)

    def _drop_marks(self) -> None:
        self._modules.drop_marks()
        self._dispatches.drop_marks()

    def put_on(self, *, step: int, window: int, is_traced: bool = False) -> None:
        """Install all hooks and open the step's log; dead objects get no hooks."""
        living_host = self._host.alive()
        log = self._new_log(step, window, is_traced=is_traced)
        self._compiling.begin()
        if not log.samples or max(log.samples) >= 0:
            self._modules.install(log.site_weights)
            weights = log.site_weights or (1.0,) * len(log.sites)
            self._watched.update(number for number, weight in enumerate(weights) if weight)
        self._dispatches.install()
        self._timers.install(living_host.timer_holders if living_host is not None else ())
        self._passes.install()
        if self._groups is not None:
            self._groups.install()
        self._stalls.install()
        self.recorder.open(log)
        self.num_hooked += not is_traced
        self.flight.begin_step()

    def _new_log(self, step: int, window: int, *, is_traced: bool) -> StepLog:
        stopwatch, budget = self.recorder.stopwatch, self.budget
        chosen, weights = samples(self._microbatches, self.num_hooked), ()
        if not (stopwatch.is_host or is_traced):
            self._learn_costs()
            limits = self._num_steps, self._step_s
            if budget.level(limits[0], count_chosen(chosen), limits[1]):
                weights = self._site_weights()
            frac = sum(map(bool, weights)) / len(weights) if weights else 1.0
            chosen = budget.chosen(chosen, self.num_hooked, *limits, frac)
        return StepLog(
            step=step,
            window=window,
            sites=self._modules.sites,
            samples=traced_samples(self._microbatches) if is_traced else chosen,
            site_weights=weights,
            max_marks=min(self._max_marks, stopwatch.num_available),
            samples_transfers=not (stopwatch.is_host or is_traced),
            frequent=budget.frequent,
            largest_pass=budget.largest_pass,
            optimizer=self._optimizer,
            counts_all=self.flight.has_unseen,
        )

    def _site_weights(self) -> tuple[float, ...]:
        # A rank's busiest micro-batch is found through all its layers with experts.
        if any(site.kind is OperatorKind.ROUTER for site in self._modules.sites):
            return ()
        layers = layer_weights(self._modules.natures, self.num_hooked)
        return tuple(layers.get(site.layer, 0.0) for site in self._modules.sites)

    def _learn_costs(self) -> None:
        """Learn what marks cost from the hooked steps that have been read since."""
        for log in self._unlearned:
            if log.issued is not None:
                self.budget.learn_cost(log)
        self._unlearned = [log for log in self._unlearned if log.readings is not None]

    def take_off(self) -> StepLog | None:
        """Close the log and remove all hooks, whatever state they are in."""
        log = self._close()
        if log is not None:
            self._end_flight(log.step)
            self._called.update(log.span_sites)
            if not log.is_host:
                self._learn(log)
        self._remove(*self._hooks, self._compiling)
        return log

    def _learn_from(self, log: StepLog) -> None:
        level = self.budget.level(self._num_steps, 1, self._step_s)
        self.budget.learn(log, is_thin=level > 0)
        self._unlearned.append(log)

    @property
    def _hooks(self) -> tuple[Any, ...]:
        return (
            *(self._modules, self._dispatches, self._timers),
            *(self._passes, self._groups, self._stalls),
        )

    def _remove(self, *all_hooks: Any) -> None:
        # A failure must not prevent the removal of the others.
        protect = self._guard.protect
        for hooks in all_hooks:
            if hooks is not None:
                try:
                    hooks.remove()
                except Exception as err:
                    self._guard.fault(err)
                    protect(hooks.remove)()  # goes on after what failed

    def coverage(self, window: int) -> tuple[CoverageRecord, ...]:
        """Return the hooks installed in a hooked step; those that fired are counted from the
        marks."""
        sites = self._modules.sites
        watched = self._watched or range(len(sites))
        kinds = Counter(sites[number].kind.value for number in watched)
        installed = {
            coverage_name(kind, is_backward): count
            for kind, count in kinds.items()
            for is_backward in (False, True)
        }
        if self._has_timers:
            installed["timers"] = 1
        installed |= dict.fromkeys(self._host.detached_host.unseen, 1)
        installed |= Counter((*self._modules.unseen, *self._dispatches.unseen))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            installed[COLLECTIVES] = int(torch.distributed.get_world_size() > 1)
        named = {name: count for name, count in installed.items() if count}
        # Remarks on silent regions, whose operators are counted under their own names.
        remarks = sorted(self._groups.remarks) if self._groups is not None else ()
        named |= dict.fromkeys((*self._regions.names, *self._remarks, *remarks), 0)
        if self._is_strange:
            named[_STRANGE] = 0
        if not self._called.issuperset(watched) and not self._regions.is_graphed:
            named |= dict.fromkeys(graphs_remark(), 0)
        if self._num_compiled:
            named[f"compiled while hooked: {self._num_compiled} steps, not recorded"] = 0
        return tuple(
            CoverageRecord(window=window, name=name, installed=count, fired=0)
            for name, count in named.items()
        )

    def memory_peak_nbytes(self) -> int:
        """Return the peak of the device allocator; on CPU the peak resident set."""
        if self.device != "cpu":
            return peak_nbytes(self._place)
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def device_memory_nbytes(self) -> int:
        """Return the device's memory; on CPU an equal share of the host's for each of its ranks."""
        if self.device == "cpu":
            host_nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            return host_nbytes // self._num_local_ranks
        return memory_nbytes(self._place)


def device_name(models: tuple[torch.nn.Module, ...]) -> str:
    """Return the name of the accelerator that computes, or ``cpu``."""
    return name_of(_device(models))


def _device(models: tuple[torch.nn.Module, ...]) -> torch.device:
    return computing_device(models)


def stopwatch_for(models: tuple[torch.nn.Module, ...]) -> Stopwatch:
    """Return the stopwatch of the model's device."""
    return stopwatch_on(_device(models))
