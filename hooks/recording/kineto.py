"""One step under PyTorch's profiler, for what events cannot tell: kernels, and who launched them.

The profiler is stopped at the end of a step and never in its middle: stopping waits for the device,
and in mid-step a rank could wait for a transfer that its peer begins only after its own stop.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from ...calib.units import format_bytes
from ..sensors.recorder import Recorder
from ..sensors.stopwatch import HostReadings
from .traced import MARK, TracedStep

_INJECTED = {
    "NSYS_PROFILING_SESSION_ID": "Nsight Systems",
    "CUDA_INJECTION64_PATH": "a tool in CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH": "a tool in NVTX_INJECTION64_PATH",
}
_TEARDOWN = "TEARDOWN_CUPTI"
_SAFE_TEARDOWN = (12, 6)
"""Before this CUDA, a teardown of CUPTI crashes replays of CUDA graphs (pytorch pull 146604)."""
LEAST_FREE_NBYTES = 3 << 29
"""Memory that CUPTI may take for its buffers, outside of PyTorch's allocator."""
_ARGUMENTS = ("megatron.training.global_vars", "_GLOBAL_ARGS")
# The profiler starts and ends around its steps, and two of them in one process abort it.
_MARGIN_STEPS = 2


class TraceStopwatch:
    """Marks that are events of the profiler's trace; mark n is the n-th, 0 the time before it."""

    is_host = False
    num_available = sys.maxsize

    def __init__(self, recorder: Recorder, start: Callable[[], None]) -> None:
        from torch._C._profiler import _RecordFunctionFast

        self._recorder = recorder
        self._start = start
        self._range = _RecordFunctionFast(MARK)
        self._is_started = False
        self.first_transfer = 0
        self.num_marks = 0

    def is_of_step(self, stream: Any) -> bool:
        """False: what the host waits for shows in no trace of streams."""
        return False

    def mark_step_stream(self) -> int:
        """The same as ``mark``."""
        return self.mark()

    def begin_step(self) -> None:
        """Nothing to prepare: the trace begins with the first micro-batch that is recorded."""

    def mark(self) -> int:
        """Put an event into the trace."""
        if not self._is_started:
            log = self._recorder.log
            if log is None or not log.is_sampling:
                return 0
            self._is_started = True
            self.first_transfer = len(log.transfer_kinds)
            self._start()
        with self._range:
            pass
        self.num_marks += 1
        return self.num_marks

    def end_step(self) -> HostReadings:
        """Replaced by the times in the trace once it has been read."""
        return HostReadings()


class Tracer:
    """Holds the profiler and the recorder's own stopwatch between ``begin`` and ``end``."""

    def __init__(self, recorder: Recorder, *, is_device: bool) -> None:
        self._recorder = recorder
        self._is_device = is_device
        self._teardown: str | None = None
        self._profile: Any = None
        self._is_running = False
        self._own = recorder.stopwatch
        self._stopwatch = TraceStopwatch(recorder, self._start)

    def begin(self) -> None:
        """Prepare the profiler; the first recorded pass starts it."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._is_device:
            activities.append(ProfilerActivity.CUDA)
        self._teardown = os.environ.get(_TEARDOWN)
        if self._is_device and self._teardown is None and torch.version.cuda:
            # Without it every launch stays 10 to 20 % slower after the trace (pytorch 144455).
            os.environ[_TEARDOWN] = "1"
        # Shapes tell which product of a linear's backward pass is which.
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.prepare_trace()
        self._recorder.stopwatch = self._stopwatch

    def _start(self) -> None:
        self._profile.start_trace()
        self._is_running = True

    def end(self) -> TracedStep | None:
        """Close the log and stop; None where no pass was recorded.  Safe to call in any state."""
        log = self._recorder.close()
        self._recorder.stopwatch = self._own
        profile, self._profile = self._profile, None
        is_running, self._is_running = self._is_running, False
        try:
            if profile is not None and is_running:
                profile.stop_trace()
            elif profile is not None:
                # A profiler that was prepared and never started would refuse the user's own.
                profile.start_trace()
                profile.stop_trace()
        finally:
            if self._teardown is None:
                os.environ.pop(_TEARDOWN, None)
        if log is None or profile is None or not is_running:
            return None
        return TracedStep(
            log=log,
            events=profile.profiler.kineto_results.events(),
            num_marks=self._stopwatch.num_marks,
            first_transfer=self._stopwatch.first_transfer,
            is_device=self._is_device,
        )


def traced_samples(microbatches: tuple[int, ...]) -> tuple[int, ...]:
    """Micro-batch of each pass, -1 where it is not traced: the last but one is.

    The last one's backward pass shares the device with the reduction of gradients.  The profiler
    runs from there to the end of the step, so the trace is short however many there are.

    >>> traced_samples((0, 1, 0, 1, 2, 3, 2, 3))
    (-1, -1, -1, -1, 2, -1, 2, -1)
    """
    chosen = sorted(set(microbatches))[-2:][:1]
    return tuple(number if number in chosen else -1 for number in microbatches)


def reason_against(step: int, *, is_device: bool, is_graphed: bool) -> str:
    """Why a step must not be traced here, in words; empty where it may be."""
    from torch._C._autograd import _profiler_enabled

    if _profiler_enabled() or _is_profiling():
        return "your own profiler is on"
    tool = next((tool for name, tool in _INJECTED.items() if os.environ.get(name)), "")
    if tool:
        return f"{tool} is profiling"
    module, name = _ARGUMENTS
    reason = _megatron_profiles(getattr(sys.modules.get(module), name, None), step)
    if not reason and is_device and is_graphed:
        reason = _graphs_suffer()
    if not reason and is_device:
        reason = _memory_is_short()
    return reason


def _graphs_suffer() -> str:
    if torch.version.cuda is None:
        return f"nobody has tried what a trace does to graphs of ROCm {torch.version.hip}"
    if _cuda_version() < _SAFE_TEARDOWN:
        return f"a trace breaks CUDA graphs before CUDA 12.6, and this is {torch.version.cuda}"
    return ""


def _memory_is_short() -> str:
    """A rank decides for itself: a step that any rank has traced stands for no rank's others."""
    free_nbytes = int(torch.cuda.mem_get_info()[0])
    if free_nbytes >= LEAST_FREE_NBYTES:
        return ""
    free = format_bytes(free_nbytes)
    return f"{free} of the device are free, less than the 1.5 GiB that a trace may take"


def _is_profiling() -> bool:
    profiler = sys.modules.get("torch.autograd.profiler")
    return bool(getattr(profiler, "_is_profiler_enabled", False))


def _megatron_profiles(arguments: Any, step: int) -> str:
    if not getattr(arguments, "profile", False):
        return ""
    first, last = int(arguments.profile_step_start), int(arguments.profile_step_end)
    if first - _MARGIN_STEPS <= step <= last + _MARGIN_STEPS:
        return f"--profile traces steps {first} to {last}"
    return ""


def _cuda_version() -> tuple[int, ...]:
    parts = (torch.version.cuda or "0.0").split(".")
    return tuple(int(part) for part in parts[:2])
