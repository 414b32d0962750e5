"""CPU cores and pauses of the threads that run concurrently with training.

A rank that its launcher has pinned to a few cores passes the pinning on to all that it starts: our
writer thread, and through it the companion, would compete with training for them.  Other cores are
used only if all ranks of the node are known, within the launcher's own affinity, and never those
of another pinned program.  Otherwise, and on systems other than Linux, affinity stays unchanged.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from .guard import THREAD_NAME_PREFIX
from .interpreter import COMPANION
from .settings import LOCAL_RANKS, LOCAL_SIZES, environ_number

PROC = Path("/proc")
_GRANTED = ("SLURM_CPUS_ON_NODE", "NCPUS")
"""Variables in which Slurm and PBS give the number of this node's cores that the job may use."""
_NAME = f"{THREAD_NAME_PREFIX}writer"


def move_to_spare_cores(environ: Mapping[str, str] = os.environ) -> None:
    """Move the calling thread off the cores that training is pinned to, if others are free.

    Threads and processes that it starts later inherit this.  No thread of training is touched.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    # Stay if files cannot be read or a cgroup, for example, forbids the move.
    with suppress(OSError, ValueError):
        cores = _spare_here(environ)
        if cores:
            # Mark the thread, so that other ranks do not take these cores for training's.
            (PROC / f"self/task/{threading.get_native_id()}/comm").write_text(_NAME)
            os.sched_setaffinity(0, cores)


def spare_cores(given: Set[int], ranks: Iterable[Set[int]], others: Iterable[Set[int]]) -> set[int]:
    """Return the cores among those ``given`` to a launch that no program is pinned to.

    A rank that may run on all of them leaves none; another program that may does not count.

    >>> sorted(spare_cores({0, 1, 2, 3}, [{0}, {1}], [{3}, {0, 1, 2, 3, 4}]))
    [2]
    >>> spare_cores({0, 1}, [{0}, {0, 1}], [])
    set()
    """
    free = set(given).difference(*ranks)
    for cores in others:
        if not free:
            break
        if not given <= cores:
            free -= cores
    return free


def _spare_here(environ: Mapping[str, str]) -> set[int]:
    launcher = os.getppid()
    num_ranks = environ_number(environ, LOCAL_SIZES, 0)
    # 0: the launcher is outside this container, and pid 0 would mean the calling thread.
    if launcher == 0 or num_ranks < 1:
        return set()
    given = os.sched_getaffinity(launcher)
    if not given - os.sched_getaffinity(os.getpid()) or not _are_granted(len(given), environ):
        return set()
    ranks = {pid: rank for pid in _children(launcher) if (rank := _local_rank(pid))}
    if not {str(number) for number in range(num_ranks)} <= set(ranks.values()):
        return set()
    pinned = [_cores_of(pid) for pid in ranks]
    free = spare_cores(given, pinned, ())
    return spare_cores(given, pinned, _others(given, free, ranks.keys())) if free else free


def _are_granted(num_cores: int, environ: Mapping[str, str]) -> bool:
    """Return False if the job has fewer cores than it can reach: the rest may be another job's."""
    stated = [environ_number(environ, [name], 0) for name in _GRANTED if environ.get(name)]
    return all(num_cores <= number for number in stated)


def _children(pid: int) -> Iterator[int]:
    for task in os.listdir(PROC / f"{pid}/task"):
        text = (PROC / f"{pid}/task/{task}/children").read_text(encoding="ascii")
        yield from map(int, text.split())


def _local_rank(pid: int) -> str:
    """Return the local rank with which a process was started; empty if it is not a rank."""
    fields = (PROC / f"{pid}/environ").read_bytes().split(b"\0")
    variables = dict(field.split(b"=", 1) for field in fields if b"=" in field)
    return next(
        (variables[n].decode() for name in LOCAL_RANKS if (n := name.encode()) in variables), ""
    )


def _cores_of(pid: int) -> set[int]:
    """Return the cores on which a rank's threads may run, except ours.

    All threads count: OpenMP pins each to a core, and NCCL narrows one during its initialization.
    """
    cores = os.sched_getaffinity(pid)
    for task in os.listdir(PROC / f"{pid}/task"):
        with suppress(ProcessLookupError, FileNotFoundError):  # the thread has ended
            more = os.sched_getaffinity(int(task))
            if not more <= cores and not _is_ours(pid, task):
                cores |= more
    return cores


def _is_ours(pid: int, task: str) -> bool:
    name = (PROC / f"{pid}/task/{task}/comm").read_text(encoding="utf-8", errors="replace")
    return name.startswith(THREAD_NAME_PREFIX)


def _others(given: Set[int], free: Set[int], ranks: Set[int]) -> Iterator[set[int]]:
    """Yield the cores of every other program that is pinned to some of ``free``."""
    for name in os.listdir(PROC):
        if not name.isdecimal() or int(name) in ranks:
            continue
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            cores = os.sched_getaffinity(int(name))
            if cores & free and not given <= cores and not _is_kernel_or_companion(name):
                yield cores


def _is_kernel_or_companion(pid: str) -> bool:
    """Return True for kernel threads, which have no arguments (some are bound per core), or a
    companion."""
    with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
        words = file.read()
    return not words or COMPANION.encode() in words


SLICE_S = 0.001
PAUSE_S = 0.02
"""Pause after each slice.  On an H200 with host-bound steps of 60 ms, working one millisecond in
five made steps 12 to 27 % longer meanwhile, one in twenty-one 3 to 8 % (``benchmarks/RESULTS.md``,
On a GPU)."""
_Item = TypeVar("_Item")


class Pacer:
    """Alternates short slices of work with pauses that leave the interpreter to training."""

    def __init__(self, pause: Callable[[float], None] = time.sleep) -> None:
        self._pause = pause
        self._begin_s = 0.0

    def keep(self) -> None:
        """Pause if a slice is over; to be called between small pieces of work."""
        if time.perf_counter() - self._begin_s > SLICE_S:
            self._pause(PAUSE_S)
            self._begin_s = time.perf_counter()

    def over(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield the same items, with pauses between them."""
        self._begin_s = time.perf_counter()
        for item in items:
            yield item
            self.keep()
