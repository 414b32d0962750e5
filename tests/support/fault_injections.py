"""Injections of faults into training; each returns an ``arrange`` or a moment of a fault."""

from __future__ import annotations

import functools
import importlib
import io
import itertools
import math
import os
import queue
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from fault_runs import RUN_ID
from fault_training import Moment, Training

HOUR_NS = 3_600 * 10**9
ALWAYS = range(10**9)
Arrange = Callable[[Training], None]


def fails(target: str, error: BaseException, calls: Container[int] = (0,)) -> Arrange:
    """Make the function ``module:Class.name`` raise in the numbered calls."""

    def arrange(training: Training) -> None:
        module, _, path = target.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        owner = functools.reduce(getattr, parents, owner)
        original, count = getattr(owner, name), itertools.count()

        @functools.wraps(original)
        def failing(*args: Any, **kwargs: Any) -> Any:
            if next(count) in calls:
                raise error
            return original(*args, **kwargs)

        setattr(owner, name, failing)

    return arrange


def on_rank(rank: int, arrange: Arrange) -> Arrange:
    """Arrange it on one rank only."""
    return lambda training: arrange(training) if training.rank == rank else None


def both(*arranges: Arrange) -> Arrange:
    """Arrange several, in order."""

    def arrange(training: Training) -> None:
        for each in arranges:
            each(training)

    return arrange


def at(iteration: int, name: str, do: Callable[[Training], object], *, rank: int = 0) -> Moment:
    """Call ``do`` at one moment of one step of one rank, or of all ranks with ``rank=-1``."""

    def moment(training: Training, now: str) -> None:
        if (training.iteration, now) == (iteration, name) and rank in (-1, training.rank):
            do(training)

    moment.__name__ = f"{getattr(do, '__name__', 'do')}-{iteration}-{name}-{rank}"
    return moment


def at_start(do: Callable[[Training], object]) -> Moment:
    """Call ``do`` before the model is built."""
    return at(-1, "start", do)


def raises(error: BaseException) -> Callable[[Training], None]:
    """Raise an error of the user's."""

    def do(training: Training) -> None:
        raise error

    do.__name__ = f"raise-{type(error).__name__}-{error}"
    return do


def wait_for_writer(training: Training) -> None:
    """Wait until the writer has written all records, however busy the machine is."""
    if training.is_bare:
        return
    while not any(_is_idle(thread) for thread in threading.enumerate() if "writer" in thread.name):
        time.sleep(0.01)


def _is_idle(thread: threading.Thread) -> bool:
    """Return True if a thread waits at an empty queue."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not queue.Queue.get.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_locals["self"].empty()


def kills(number: int) -> Callable[[Training], None]:
    """Signal the training process after the writer has written all records."""

    def do(training: Training) -> None:
        wait_for_writer(training)
        os.kill(os.getpid(), number)

    do.__name__ = f"signal-{number}"
    return do


def handles(number: int, handler: Callable[[Training], object]) -> Callable[[Training], None]:
    """Install a signal handler of the user's."""

    def do(training: Training) -> None:
        signal.signal(number, lambda *_: handler(training))

    do.__name__ = f"handle-{number}"
    return do


def in_turn(*moments: Moment) -> Moment:
    """Combine several moments into one."""

    def moment(training: Training, now: str) -> None:
        for each in moments:
            each(training, now)

    moment.__name__ = "-".join(each.__name__ for each in moments)
    return moment


# The disk.


def records_of(training: Training) -> Path:
    """Return the folder of this run's records."""
    return training.folder / "out" / "records" / RUN_ID


def a_file_in_the_way(training: Training) -> None:
    """Put a file where the directory belongs, so that not even root can make it."""
    (training.folder / "out").write_text("in the way")


def no_space(training: Training) -> None:
    """Make every write of the record file fail for lack of space."""
    module = importlib.import_module("forerun.hooks.recording.writer")
    module.open_records = lambda path: io.BufferedWriter(io.FileIO("/dev/full", "r+"))


def existing_file(text: bytes) -> Arrange:
    """Create this run's record file beforehand."""

    def arrange(training: Training) -> None:
        records_of(training).mkdir(parents=True, exist_ok=True)
        (records_of(training) / f"rank-{training.rank:05d}.jsonl").write_bytes(text)

    return arrange


def a_hanging_disk(training: Training) -> None:
    """Make the file a pipe that nobody reads, so that opening it does not return."""
    records_of(training).mkdir(parents=True)
    os.mkfifo(records_of(training) / f"rank-{training.rank:05d}.jsonl")


def limit_file_size(nbytes: int) -> Callable[[Training], None]:
    """Limit file sizes: the write that exceeds the limit is cut off, the next one fails."""

    def do(training: Training) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

    return do


def remove_directory(training: Training) -> None:
    """Delete the records while they are written."""
    shutil.rmtree(training.folder / "out")


def exhaust_file_descriptors(training: Training) -> None:
    """Use up all file descriptors."""
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (used, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


def restore_file_limit(training: Training) -> None:
    """Make file descriptors available again."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def fail_thread_start(training: Training) -> None:
    """Make the start of the writer's thread fail."""
    start = threading.Thread.start

    def failing(thread: threading.Thread) -> None:
        if thread.name.startswith("forerun"):
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = failing


# Clocks and devices.


def begin_clock_jump(training: Training) -> None:
    """Begin the jump of the clock."""
    training.memory["has_jumped"] = True


def clock_jumps(by_ns: int) -> Arrange:
    """Make the process's monotonic clock jump while the window is open."""

    def arrange(training: Training) -> None:
        real = time.perf_counter_ns
        assert "forerun.hooks.session.session" not in sys.modules

        def jumping() -> int:
            return real() + by_ns * training.memory.get("has_jumped", False)

        time.perf_counter_ns = jumping

    return arrange


def wall_clock_jumps(training: Training) -> None:
    """Set the time of day back by one hour."""
    real = time.time
    time.time = lambda: real() - 3600.0


class Event:
    """Device event with a planted reading."""

    num_remaining = ALWAYS.stop

    def __init__(self, reading_ms: float, is_reached: bool) -> None:
        self._reading_ms = reading_ms
        self._is_reached = is_reached

    def record(self, stream: object) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True if the device ever gets here."""
        return self._is_reached

    def elapsed_time(self, end_event: Any) -> float:
        """Return the planted reading, milliseconds."""
        return self._reading_ms


def device_reads(
    reading_ms: float, *, is_reached: bool = True, num_events: float = math.inf
) -> Arrange:
    """Mark on a device that returns nonsense, hangs, or runs out of events."""

    def arrange(training: Training) -> None:
        from forerun.hooks.sensors.stopwatch import DeviceStopwatch
        from forerun.hooks.session import instruments

        count = itertools.count()

        def make() -> Event:
            if next(count) >= num_events:
                raise RuntimeError("out of events")
            return Event(reading_ms, is_reached)

        assert hasattr(instruments, "stopwatch_for")
        instruments.stopwatch_for = lambda *_, **__: DeviceStopwatch(make)

    return arrange


# Logging and W&B.


def handler_raises(training: Training) -> None:
    """Install a log handler of the user's that fails on every line of ours."""
    import logging

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("log server is gone")

    logging.getLogger("forerun").addHandler(Broken())


def streams_closed(training: Training) -> None:
    """Close the readers of the process's output."""
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 2)
    os.dup2(write, 1)


class BrokenRun:
    """A W&B run that fails at every call."""

    step = 0

    def log(self, *_: Any, **__: Any) -> None:
        raise ConnectionError("W&B is away")


def wandb_log_raises(training: Training) -> None:
    """Give the real module a run whose ``log`` fails, as if its service process had died."""
    import wandb

    wandb.run = BrokenRun()


def wandb_raises(training: Training) -> None:
    """Import a module ``wandb`` that fails at every attribute."""
    from types import ModuleType

    class Broken(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no {name} here")

    sys.modules["wandb"] = Broken("wandb")
