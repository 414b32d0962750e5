"""A command and all that it starts: signals to it, its exit code, and nobody left behind.

torchrun puts every worker into a session of its own, so that neither its process group nor its
terminal reaches them, and where it dies its workers run on as orphans.  On Linux this process
adopts orphans (``PR_SET_CHILD_SUBREAPER``), which keeps all of them below it in ``/proc``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# A process in a driver's call dies when that returns; one that hangs there never does.
_KILL_PATIENCE_S = 10.0


class ProcessTree:
    """One command that was started, and its descendants.

    Only one may live in a process: it reaps every child that there is.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # A session of its own: Ctrl-C then reaches us alone, and is passed on once.
        self._process = subprocess.Popen(
            list(command),
            env=dict(environ),
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        self.pid = self._process.pid
        self.code: int | None = None
        """Exit code of the command, minus n where signal n ended it; None while it runs."""
        self._told: set[int] = set()

    def reap(self) -> None:
        """Take note of every child that has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._told.discard(pid)
            if pid == self.pid:
                self.code = self._process.returncode = os.waitstatus_to_exitcode(status)

    def send(self, number: int) -> None:
        """The signal to the command's process group: as a terminal would, so not to workers."""
        self._told.update(pid for pid, (_, group) in _living().items() if group == self.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def end_orphans(self) -> None:
        """SIGTERM, once each, to those that have lost their parent and came to us.

        Workers of a torchrun that lives are its own to end.
        """
        for pid in children_of(os.getpid()) - self._told - {self.pid}:
            self._told.add(pid)
            _kill(pid, signal.SIGTERM)

    def rest(self) -> set[int]:
        """Who is alive below us, the command included."""
        self.reap()
        return descendants(os.getpid())

    def kill(self) -> None:
        """SIGKILL to all that is left, until nobody is."""
        end_s = time.monotonic() + _KILL_PATIENCE_S
        if self.code is None:  # afterwards the number may be another group's
            self.send(signal.SIGKILL)
        while (left := self.rest()) and time.monotonic() < end_s:
            for pid in left:
                _kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        while self.code is None and time.monotonic() < end_s:
            self.reap()
            time.sleep(0.02)

    def outlast(self, numbers: Sequence[int]) -> None:
        """Wait for the command in the simplest way there is; these signals end it as SIGTERM.

        For where watching has failed: nothing is killed, and ``code`` is the command's.
        """
        for number in numbers:
            with suppress(Exception):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, lambda *_: self._end_quietly())
        while self.code is None:
            try:
                _, status = os.waitpid(self.pid, 0)
                self.code = self._process.returncode = os.waitstatus_to_exitcode(status)
            except ChildProcessError:
                self.code = self._process.returncode or 0
            except BaseException:  # such as one that a signal brought
                time.sleep(0.1)

    def _end_quietly(self) -> None:
        with suppress(Exception):
            if self.code is None:
                os.killpg(self.pid, signal.SIGTERM)


# By hand and not with psutil: `forerun run` needs the standard library alone.
def children_of(pid: int) -> set[int]:
    """Direct children that are alive; empty where there is no ``/proc``."""
    return {child for child, (parent, _) in _living().items() if parent == pid}


def descendants(pid: int) -> set[int]:
    """Children, their children, and so on, that are alive; empty where there is no ``/proc``."""
    parents = {child: parent for child, (parent, _) in _living().items()}
    found: set[int] = set()
    front = {pid}
    while front:
        front = {child for child, parent in parents.items() if parent in front} - found
        found |= front
    return found


def _living() -> dict[int, tuple[int, int]]:
    """Parent and process group of every process that is not a zombie."""
    found: dict[int, tuple[int, int]] = {}
    entries = PROC.iterdir() if PROC.is_dir() else ()
    for entry in entries:
        if not entry.name.isdecimal():
            continue
        with suppress(OSError, IndexError, ValueError):  # it may end while we read
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            # The name in parentheses may hold anything.
            state, parent, group = text.rpartition(")")[2].split()[:3]
            if state not in "ZXx":
                found[int(entry.name)] = int(parent), int(group)
    return found


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _end_with_parent() -> None:
    """In the child before it becomes the command: SIGTERM where we are killed ourselves."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> bool:
    if _LIBC is None:
        return False
    return _LIBC.prctl(option, value, 0, 0, 0) == 0


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
