"""How faults are thrown into training; each returns an ``arrange`` or a moment of a fault."""

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
    """The function ``module:Class.name`` raises in the numbered calls."""

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
    """Only there."""
    return lambda training: arrange(training) if training.rank == rank else None


def both(*arranges: Arrange) -> Arrange:
    """One after the other."""

    def arrange(training: Training) -> None:
        for each in arranges:
            each(training)

    return arrange


def at(iteration: int, name: str, do: Callable[[Training], object], *, rank: int = 0) -> Moment:
    """``do`` at one moment of one step of one rank; of all ranks with ``rank=-1``."""

    def moment(training: Training, now: str) -> None:
        if (training.iteration, now) == (iteration, name) and rank in (-1, training.rank):
            do(training)

    moment.__name__ = f"{getattr(do, '__name__', 'do')}-{iteration}-{name}-{rank}"
    return moment


def at_start(do: Callable[[Training], object]) -> Moment:
    """``do`` before the model is built."""
    return at(-1, "start", do)


def raises(error: BaseException) -> Callable[[Training], None]:
    """The user's own error."""

    def do(training: Training) -> None:
        raise error

    do.__name__ = f"raise-{type(error).__name__}-{error}"
    return do


def let_write(training: Training) -> None:
    """Wait until the writer has written what it was given, however busy the machine is."""
    if training.is_bare:
        return
    while not any(_rests(thread) for thread in threading.enumerate() if "writer" in thread.name):
        time.sleep(0.01)


def _rests(thread: threading.Thread) -> bool:
    """True where a thread waits at a queue that is empty."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not queue.Queue.get.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_locals["self"].empty()


def kills(number: int) -> Callable[[Training], None]:
    """A signal to the training process; the writer has written what it was given."""

    def do(training: Training) -> None:
        let_write(training)
        os.kill(os.getpid(), number)

    do.__name__ = f"signal-{number}"
    return do


def handles(number: int, handler: Callable[[Training], object]) -> Callable[[Training], None]:
    """The user's own handler."""

    def do(training: Training) -> None:
        signal.signal(number, lambda *_: handler(training))

    do.__name__ = f"handle-{number}"
    return do


def in_turn(*moments: Moment) -> Moment:
    """Several moments as one."""

    def moment(training: Training, now: str) -> None:
        for each in moments:
            each(training, now)

    moment.__name__ = "-".join(each.__name__ for each in moments)
    return moment


# The disk.


def records_of(training: Training) -> Path:
    """The folder of this run's records."""
    return training.folder / "out" / "records" / RUN_ID


def a_file_in_the_way(training: Training) -> None:
    """The directory cannot be made, for root neither."""
    (training.folder / "out").write_text("in the way")


def no_space(training: Training) -> None:
    """Every write of the record file fails for want of space."""
    module = importlib.import_module("forerun.hooks.recording.writer")
    module.open_records = lambda path: io.BufferedWriter(io.FileIO("/dev/full", "r+"))


def found(text: bytes) -> Arrange:
    """This run's own file is there already."""

    def arrange(training: Training) -> None:
        records_of(training).mkdir(parents=True, exist_ok=True)
        (records_of(training) / f"rank-{training.rank:05d}.jsonl").write_bytes(text)

    return arrange


def a_hanging_disk(training: Training) -> None:
    """Opening the file does not return: it is a pipe that nobody reads."""
    records_of(training).mkdir(parents=True)
    os.mkfifo(records_of(training) / f"rank-{training.rank:05d}.jsonl")


def files_end_at(nbytes: int) -> Callable[[Training], None]:
    """No file grows beyond that: the write in which it would is cut off, the next one fails."""

    def do(training: Training) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

    return do


def remove_directory(training: Training) -> None:
    """The records go while they are written."""
    shutil.rmtree(training.folder / "out")


def no_more_files(training: Training) -> None:
    """No file descriptor is left."""
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (used, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


def files_again(training: Training) -> None:
    """There are some again."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def no_thread(training: Training) -> None:
    """The writer's thread cannot be started."""
    start = threading.Thread.start

    def failing(thread: threading.Thread) -> None:
        if thread.name.startswith("forerun"):
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = failing


# Clocks and devices.


def jump(training: Training) -> None:
    """From here on the clock is another."""
    training.memory["has_jumped"] = True


def clock_jumps(by_ns: int) -> Arrange:
    """The monotonic clock of the process jumps while the window is open."""

    def arrange(training: Training) -> None:
        real = time.perf_counter_ns
        assert "forerun.hooks.session.session" not in sys.modules

        def jumping() -> int:
            return real() + by_ns * training.memory.get("has_jumped", False)

        time.perf_counter_ns = jumping

    return arrange


def wall_clock_jumps(training: Training) -> None:
    """The time of day goes back one hour."""
    real = time.time
    time.time = lambda: real() - 3600.0


class Event:
    """A device event whose reading is what the test says."""

    num_left = ALWAYS.stop

    def __init__(self, reading_ms: float, is_reached: bool) -> None:
        self._reading_ms = reading_ms
        self._is_reached = is_reached

    def record(self, stream: object) -> None:
        """Nothing to do."""

    def query(self) -> bool:
        """Whether the device ever gets here."""
        return self._is_reached

    def elapsed_time(self, end_event: Any) -> float:
        """The reading."""
        return self._reading_ms


def device_reads(
    reading_ms: float, *, is_reached: bool = True, num_events: float = math.inf
) -> Arrange:
    """Marks are events of a device that reads nonsense, hangs, or has no more events."""

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
    """The user's log handler fails on every line of ours."""
    import logging

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("log server is gone")

    logging.getLogger("forerun").addHandler(Broken())


def streams_closed(training: Training) -> None:
    """Nobody reads what the process prints."""
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
    """A real module with a run whose ``log`` fails, as when the service process has died."""
    import wandb

    wandb.run = BrokenRun()


def wandb_raises(training: Training) -> None:
    """A module ``wandb`` that fails at every attribute."""
    from types import ModuleType

    class Broken(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no {name} here")

    sys.modules["wandb"] = Broken("wandb")
