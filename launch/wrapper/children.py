"""A command and all that it starts: signals to us and to it, its exit code, nobody left behind.

torchrun puts every worker into a session of its own, so that neither its process group nor its
terminal reaches them, and where it dies its workers run on as orphans.  On Linux this process
adopts orphans (``PR_SET_CHILD_SUBREAPER``), which keeps all of them below it in ``/proc``.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that request a program to end."""
WARN = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals of a scheduler before its limit; torchrun dies of them and leaves its workers."""
PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# A process in a driver's call dies when that returns; one that hangs there never does.
_KILL_PATIENCE_S = 10.0
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class SignalInbox:
    """A context in which ``END``, ``WARN`` and the end of children are collected.

    They are values to be read in a loop: nothing is done inside a handler.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._before: dict[int, Any] = {}
        self._wakeup = -1

    def __enter__(self) -> SignalInbox:
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (*END, *WARN, signal.SIGCHLD):
            # A signal that nohup ignores stays ignored, here and in the command.
            if signal.getsignal(number) is not signal.SIG_IGN:
                # A handler must be there for the number to be written to the pipe.
                self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def wait(self, timeout_s: float) -> list[int]:
        """The signals that came since the last call, or within the time; children left out."""
        waiting = select.poll()  # unlike select, of any number of open files
        waiting.register(self._read, select.POLLIN)
        if not waiting.poll(max(0.0, timeout_s) * 1000.0):
            return []
        with suppress(BlockingIOError):
            return [n for n in os.read(self._read, 4096) if n != signal.SIGCHLD]
        return []


class ProcessTree:
    """One command that was started, and its descendants.

    Only one may live in a process: it reaps every child that there is.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # A session of its own: Ctrl-C then reaches us alone, and is passed on once.  Where we are
        # killed ourselves, it gets SIGTERM.
        self._process = subprocess.Popen(
            list(command),
            env=dict(environ),
            start_new_session=True,
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        self.pid = self._process.pid
        self.code: int | None = None
        """Exit code of the command, minus n where signal n ended it; None while it runs."""
        self._signalled: set[int] = set()

    def reap(self) -> None:
        """Take note of every child that has ended."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._signalled.discard(ended[0])
                if ended[0] == self.pid:
                    self.code = self._process.returncode = os.waitstatus_to_exitcode(ended[1])

    def send(self, number: int) -> None:
        """The signal to the command's process group: as a terminal would, so not to workers."""
        self._signalled.update(pid for pid, (_, group) in _living().items() if group == self.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def end_orphans(self) -> None:
        """SIGTERM, once each, to those that have lost their parent and came to us.

        Workers of a torchrun that lives are its own to end.
        """
        adopted = {pid for pid, (parent, _) in _living().items() if parent == os.getpid()}
        for pid in adopted - self._signalled - {self.pid}:
            self._signalled.add(pid)
            _kill(pid, signal.SIGTERM)

    # By hand and not with psutil: `forerun run` needs the standard library alone.
    def living_pids(self) -> set[int]:
        """Who is alive below us, the command included; empty where there is no ``/proc``."""
        self.reap()
        parents = {child: parent for child, (parent, _) in _living().items()}
        descendants: set[int] = set()
        front = {os.getpid()}
        while front:
            front = {child for child, parent in parents.items() if parent in front} - descendants
            descendants |= front
        return descendants

    def kill(self) -> None:
        """SIGKILL to all that is left, until nobody is."""
        end_s = time.monotonic() + _KILL_PATIENCE_S
        if self.code is None:  # afterwards the number may be another group's
            self.send(signal.SIGKILL)
        while ((remaining := self.living_pids()) or self.code is None) and time.monotonic() < end_s:
            for pid in remaining:
                _kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def wait_for_exit(self, numbers: Sequence[int]) -> None:
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


def _living() -> dict[int, tuple[int, int]]:
    """Parent and process group of every process that is not a zombie."""
    processes: dict[int, tuple[int, int]] = {}
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError, IndexError, ValueError):  # it may end while we read
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            # The name in parentheses may hold anything.
            state, parent, group = text.rpartition(")")[2].split()[:3]
            if state not in "ZXx":
                processes[int(entry.name)] = int(parent), int(group)
    return processes


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if _LIBC is not None:
        _LIBC.prctl(option, value, 0, 0, 0)
