"""Everything that is put on for a hooked step and taken off after it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from ..calib.samples.records import CoverageRecord
from .guard import Guard
from .host import Host
from .modules import ModuleHooks
from .process_groups import ProcessGroupHooks
from .recorder import Recorder, StepLog
from .stopwatch import DeviceStopwatch, HostStopwatch, Stopwatch
from .timers import TimerHooks
from .writer import coverage_name

MAX_STRIDE = 8


class Instruments:
    """The hooks of one training process, off unless a step is being hooked."""

    def __init__(self, host: Host, guard: Guard, *, num_passes: int = 0) -> None:
        self._host = host
        self._num_hooked = 0
        self._stride = sampling_stride(num_passes)
        self.device = device_name(host.models)
        self.recorder = Recorder(_stopwatch(host.models))
        self._modules = ModuleHooks(host.models, self.recorder, guard)
        self._timers = TimerHooks(self.recorder, guard)
        self._groups = (
            ProcessGroupHooks(self.recorder, guard) if torch.distributed.is_available() else None
        )

    def put_on(self, *, step: int, window: int) -> None:
        """Install all hooks and open the step's log."""
        self._modules.install()
        self._timers.install(self._host.timer_holders)
        if self._groups is not None:
            self._groups.install()
        self.recorder.open(
            StepLog(
                step=step,
                window=window,
                sites=self._modules.sites,
                stride=self._stride,
                offset=self._num_hooked,
                num_parameters=num_parameters(self._host.optimizers),
            )
        )
        self._num_hooked += 1

    def take_off(self) -> StepLog | None:
        """Close the log and remove all hooks, whatever state they are in."""
        log = self.recorder.close()
        self._modules.remove()
        self._timers.remove()
        if self._groups is not None:
            self._groups.remove()
        return log

    def coverage(self, window: int) -> tuple[CoverageRecord, ...]:
        """What is installed in a hooked step; what fired is counted from the marks."""
        kinds = Counter(site.kind.value for site in self._modules.sites)
        installed = {
            coverage_name(kind, is_backward): count
            for kind, count in kinds.items()
            for is_backward in (False, True)
        }
        if self._host.timer_holders:
            installed["timers"] = 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            installed["collectives"] = int(torch.distributed.get_world_size() > 1)
        return tuple(
            CoverageRecord(window=window, name=name, installed=count, fired=0)
            for name, count in installed.items()
            if count
        )

    def memory_peak_nbytes(self) -> int:
        """Peak of the device allocator; on CPU the peak resident set."""
        if self.device != "cpu":
            return int(torch.cuda.max_memory_allocated())
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def device_memory_nbytes(self) -> int:
        """Memory that the device has; 0 on CPU, where ranks share it."""
        if self.device == "cpu":
            return 0
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def sampling_stride(num_passes: int) -> int:
    """Distance between the micro-batches of a step whose operators are timed: at least two are.

    All ranks time the same ones.  Where the number of passes is not known (0), every one is.

    >>> [sampling_stride(n) for n in (0, 1, 2, 4, 8, 64)]
    [1, 1, 1, 2, 4, 8]
    """
    return max(1, min(num_passes // 2, MAX_STRIDE))


def num_parameters(optimizers: tuple[Any, ...]) -> int:
    """Parameters that this rank updates: its shards under the distributed optimizer."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return sum(weight.numel() for group in groups for weight in group["params"])


def device_name(models: tuple[Any, ...]) -> str:
    """Name of the accelerator that holds the parameters, or ``cpu``.

    ``torch.cuda.is_available`` is not asked: under the CPU stand-in it says yes.
    """
    weight = _any_parameter(models)
    if weight is None or weight.device.type != "cuda":
        return "cpu"
    return torch.cuda.get_device_name(weight.device)


def _any_parameter(models: tuple[Any, ...]) -> torch.Tensor | None:
    return next((weight for model in models for weight in model.parameters()), None)


def _stopwatch(models: tuple[Any, ...]) -> Stopwatch:
    weight = _any_parameter(models)
    if weight is None or weight.device.type != "cuda":
        return HostStopwatch()
    return DeviceStopwatch(
        lambda: torch.cuda.Event(enable_timing=True),
        is_capturing=torch.cuda.is_current_stream_capturing,
    )
