"""One step under PyTorch's profiler, for facts that events lack: kernels, and their launches.

The profiler is stopped at the end of a step and never in its middle: stopping waits for the device,
and in mid-step a rank could wait for a transfer that its peer begins only after its own stop.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ...calib.marks.traced_step import MARK, TracedStep
from ...calib.units import format_bytes
from ..sensors.recorder import Recorder
from ..sensors.stopwatch import HostReadings
from .writer import ExportedStep

_INJECTED = {
    "NSYS_PROFILING_SESSION_ID": "Nsight Systems",
    "CUDA_INJECTION64_PATH": "a tool in CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH": "a tool in NVTX_INJECTION64_PATH",
}
_TEARDOWN = "TEARDOWN_CUPTI"
_VARIABLES = (_TEARDOWN, "DISABLE_CUPTI_LAZY_REINIT")
"""Variables that Kineto reads, and that PyTorch sets for CUDA graphs (profiler.py)."""
_SAFE_TEARDOWN = (12, 6)
"""Before this CUDA, a teardown of CUPTI crashes replays of CUDA graphs (pytorch pull 146604)."""
TEARDOWN_S = 0.25
"""Timeout at a step's end for the teardown; before it, Kineto's thread flushes CUPTI's buffers."""
_POLL_S = 0.002
_THREADS = "/proc/self/task"
_COUNTED = "ProfilerStep"
"""Name under which PyTorch counts steps, from a profiler's creation to the end of its ``with``."""
LEAST_FREE_NBYTES = 3 << 29
"""Memory that CUPTI may take for its buffers, outside of PyTorch's allocator."""
_ARGUMENTS = ("megatron.training.global_vars", "_GLOBAL_ARGS")
# The profiler runs somewhat beyond its steps, and two profilers in one process abort it.
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
        """Return False: waits of the host do not appear in a trace of streams."""
        return False

    def mark_step_stream(self) -> int:
        """Put an event into the trace, like ``mark``."""
        return self.mark()

    def begin_step(self) -> None:
        """Do nothing: the trace begins with the first recorded micro-batch."""

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
        """Return empty readings: the marks remain numbers of the trace's events."""
        return HostReadings()


class Tracer:
    """Owner of the profiler and of the recorder's original stopwatch, from ``begin`` to ``end``."""

    def __init__(self, recorder: Recorder, *, is_device: bool) -> None:
        self._recorder = recorder
        self._is_device = is_device
        self._variables: dict[str, str | None] = {}
        self._profile: Any = None
        self._is_running = False
        self._original_stopwatch = recorder.stopwatch
        self._stopwatch = TraceStopwatch(recorder, self._start)

    def begin(self) -> None:
        """Prepare the profiler; the first recorded pass starts it."""
        from torch.autograd.profiler import KinetoStepTracker
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._is_device:
            activities.append(ProfilerActivity.CUDA)
        self._variables = {name: os.environ.get(name) for name in _VARIABLES}
        is_counted = _is_counted()
        # Without shapes, the metadata of NCCL's transfers have not been seen.
        self._profile = profile(activities=activities, record_shapes=True)
        if not is_counted and _is_counted():
            KinetoStepTracker.erase_step_count(_COUNTED)
        self._profile.prepare_trace()
        self._recorder.stopwatch = self._stopwatch

    def _start(self) -> None:
        self._profile.start_trace()
        self._is_running = True

    def end(self, *, is_recorded: bool = True) -> ExportedStep | None:
        """Close the log, stop and export the trace; None if no pass was recorded or nothing shall
        be.

        Safe to call in any state.  The export needs the interpreter, a few microseconds for each
        event; here it delays a step that is no measurement, on all ranks at once.
        """
        log = self._recorder.close()
        self._recorder.stopwatch = self._original_stopwatch
        profile, self._profile = self._profile, None
        is_running, self._is_running = self._is_running, False
        try:
            if profile is not None and not is_running:
                # A prepared profiler that is never started would block the user's own.
                profile.start_trace()
            if profile is not None:
                with _torn_down() if self._is_device else nullcontext():
                    profile.stop_trace()
        finally:
            for name, value in self._variables.items():
                _put_back(name, value)
        if log is None or profile is None or not is_running or not is_recorded:
            return None
        step = TracedStep(
            log=log,
            trace="",
            num_marks=self._stopwatch.num_marks,
            first_transfer=self._stopwatch.first_transfer,
            is_device=self._is_device,
        )
        return ExportedStep(step=step, file=_exported(profile))


def _exported(profile: Any) -> Path:
    """Return the trace in a new folder of this node, since a shared file system may be slow."""
    file = Path(tempfile.mkdtemp(prefix="forerun-")) / "trace.json"
    try:
        profile.export_chrome_trace(str(file))
    except BaseException:
        shutil.rmtree(file.parent)
        raise
    return file


@contextmanager
def _torn_down() -> Iterator[None]:
    """Tear CUPTI down after the trace that ends inside, unless the environment decides.

    Otherwise every launch stays 10 to 20 % slower (pytorch 144455).  Kineto (114171d,
    libkineto/src/CuptiActivityApi.cpp, teardownContext) reads the variable whenever a trace is
    prepared or ends.  It is unset while ours is prepared: otherwise, CUPTI left on by an earlier
    profiler would be torn down during our trace.  A thread of Kineto's then waits for the end of
    any CUDA runtime call, tears CUPTI down, and reads the variable again, to set CUPTI up at once
    or with the next trace.  A profiler that began before that call would see no kernels (kineto
    pull 1554), and one that ended with the variable set would begin a second thread (kineto pull
    1169).  So we make that call, and wait for that thread before the variable is unset.
    """
    if not torch.version.cuda or _TEARDOWN in os.environ:
        yield
        return
    os.environ[_TEARDOWN] = "1"
    before = _threads()
    yield
    begun = _threads() - before
    end_s = time.monotonic() + TEARDOWN_S
    while begun & _threads() and time.monotonic() < end_s:
        torch.cuda.current_stream().query()
        time.sleep(_POLL_S)


def _threads() -> frozenset[str]:
    """Return the thread IDs of this process; empty if the system does not list them."""
    try:
        return frozenset(os.listdir(_THREADS))
    except OSError:
        return frozenset()


def _put_back(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    elif os.environ.get(name) != value:
        os.environ[name] = value


def traced_samples(microbatches: tuple[int, ...]) -> tuple[int, ...]:
    """Return the micro-batch of each pass, -1 if it is not traced; the last but one is traced.

    The last one's backward pass shares the device with the reduction of gradients.  The profiler
    runs from there to the end of the step, so the trace is short regardless of their number.

    >>> traced_samples((0, 1, 0, 1, 2, 3, 2, 3))
    (-1, -1, -1, -1, 2, -1, 2, -1)
    """
    chosen = sorted(set(microbatches))[-2:][:1]
    return tuple(number if number in chosen else -1 for number in microbatches)


def reason_against(step: int, *, is_device: bool, is_graphed: bool) -> str:
    """Return why a step must not be traced here; empty if it may be."""
    from torch._C._autograd import _profiler_enabled

    if _profiler_enabled() or _is_profiling():
        return "your own profiler is on"
    tool = next((tool for name, tool in _INJECTED.items() if os.environ.get(name)), "")
    if tool:
        return f"{tool} is profiling"
    module, name = _ARGUMENTS
    arguments = getattr(sys.modules.get(module), name, None)
    reason = _megatron_profiles(arguments, step)
    if _is_counted() and not getattr(arguments, "profile", False):
        return "your own profiler may start at any step"
    if not reason and is_device:
        reason = _device_forbids(is_graphed=is_graphed)
    return reason


def _device_forbids(*, is_graphed: bool) -> str:
    reason = _graphs_suffer() if is_graphed else ""
    kinds = torch.profiler.supported_activities()
    if not reason and torch.profiler.ProfilerActivity.CUDA not in kinds:
        # It would record two events around each operation instead of kernels.
        reason = "this PyTorch was built without the tracing of device kernels"
    return reason or _memory_is_short()


def _graphs_suffer() -> str:
    if torch.version.cuda is None:
        return f"the effect of a trace on graphs of ROCm {torch.version.hip} is untested"
    if _cuda_version() < _SAFE_TEARDOWN:
        return f"a trace breaks CUDA graphs before CUDA 12.6, and this is {torch.version.cuda}"
    return ""


def _memory_is_short() -> str:
    """Return why memory is too short for a trace; empty if it is not.

    Ranks decide independently: a step that any rank has traced is excluded on all.
    """
    free_nbytes = int(torch.cuda.mem_get_info()[0])
    if free_nbytes >= LEAST_FREE_NBYTES:
        return ""
    free = format_bytes(free_nbytes)
    return f"{free} of the device are free, less than the 1.5 GiB that a trace may take"


def _is_profiling() -> bool:
    profiler = sys.modules.get("torch.autograd.profiler")
    return bool(getattr(profiler, "_is_profiler_enabled", False))


def _is_counted() -> bool:
    """Return True if a profiler of the user's waits, warms up or was stopped without a ``with``.

    A waiting one would start inside our trace, which raises in the user's code, or after it.
    """
    profiler = sys.modules.get("torch.autograd.profiler")
    return _COUNTED in getattr(getattr(profiler, "KinetoStepTracker", None), "_step_dict", {})


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
