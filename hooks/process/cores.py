"""Threads beside training: which cores they run on, and how often they pause.

A rank that its launcher has pinned to a few cores hands them on to all that it starts: our thread
that writes, and by that thread the companion, would take turns with training on them.  Cores are
taken only where all ranks of the node are known, within what the launcher itself may use, and never
from another program that is pinned to some.  Else, and elsewhere than on Linux, all stays as it is.
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
from .settings import LOCAL_RANKS, LOCAL_SIZES

PROC = Path("/proc")
_GRANTED = ("SLURM_CPUS_ON_NODE", "NCPUS")
"""Variables in which Slurm and PBS say how many cores of this node the job may use."""
_NAME = f"{THREAD_NAME_PREFIX}writer"


def move_to_spare_cores(environ: Mapping[str, str] = os.environ) -> None:
    """Take the calling thread off the cores that training is pinned to, where others are left.

    What the thread starts from then on goes with it.  No thread of training is touched.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    # What cannot be read or is not allowed, by a cgroup for one, is a reason to stay.
    with suppress(OSError, ValueError):
        cores = _spare_here(environ)
        if cores:
            # Another rank that looks later must not take these cores for training's.
            (PROC / f"self/task/{threading.get_native_id()}/comm").write_text(_NAME)
            os.sched_setaffinity(0, cores)


def spare_cores(given: Set[int], ranks: Iterable[Set[int]], others: Iterable[Set[int]]) -> set[int]:
    """The cores among those ``given`` to a launch that no program is pinned to.

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
    num_ranks = int(
        next((size_text for name in LOCAL_SIZES if (size_text := environ.get(name))), "0")
    )
    # 0: the launcher is outside of this container, and number 0 would mean this thread.
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
    """False where the job has fewer cores than it can reach: the rest may be another job's."""
    return all(num_cores <= int(environ[name]) for name in _GRANTED if environ.get(name))


def _children(pid: int) -> Iterator[int]:
    for task in os.listdir(PROC / f"{pid}/task"):
        text = (PROC / f"{pid}/task/{task}/children").read_text(encoding="ascii")
        yield from map(int, text.split())


def _local_rank(pid: int) -> str:
    """Which rank of its node a process was started as; empty where it is none."""
    fields = (PROC / f"{pid}/environ").read_bytes().split(b"\0")
    variables = dict(field.split(b"=", 1) for field in fields if b"=" in field)
    return next(
        (variables[n].decode() for name in LOCAL_RANKS if (n := name.encode()) in variables), ""
    )


def _cores_of(pid: int) -> set[int]:
    """Where the threads of a rank may run, but for ours.

    All of them count: OpenMP pins each thread to a core, and NCCL narrows one while it begins.
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
    """Cores of every other program that is pinned to some of ``free``."""
    for name in os.listdir(PROC):
        if not name.isdecimal() or int(name) in ranks:
            continue
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            cores = os.sched_getaffinity(int(name))
            if cores & free and not given <= cores and not _is_kernel_or_companion(name):
                yield cores


def _is_kernel_or_companion(pid: str) -> bool:
    """Threads of the kernel, which has some bound to every core, have no arguments."""
    with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
        words = file.read()
    return not words or COMPANION.encode() in words


SLICE_S = 0.001
PAUSE_S = 0.02
"""On an H200 whose steps of 60 ms waited for Python a millisecond in five made them 12 to 27 %
longer while it lasted, one in twenty-one 3 to 8 % (``benchmarks/RESULTS.md``, On a GPU)."""
_Item = TypeVar("_Item")


class Pacer:
    """A short slice of work, then a pause in which training has the interpreter to itself."""

    def __init__(self, pause: Callable[[float], None] = time.sleep) -> None:
        self._pause = pause
        self._begin_s = 0.0

    def keep(self) -> None:
        """Pause where a slice is over; to be called between small pieces of work."""
        if time.perf_counter() - self._begin_s > SLICE_S:
            self._pause(PAUSE_S)
            self._begin_s = time.perf_counter()

    def over(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The same items, with pauses between them."""
        self._begin_s = time.perf_counter()
        for item in items:
            yield item
            self.keep()
