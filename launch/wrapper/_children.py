"""Supervision of a command and its descendants: signals, exit code, and complete clean-up.

torchrun puts every worker into a separate session, so that signals to its process group or
terminal do not reach them, and if it dies its workers run on as orphans.  On Linux this process
adopts orphans (``PR_SET_CHILD_SUBREAPER``), so that all remain its descendants in ``/proc``.
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
# A process inside a driver call dies when the call returns; one that hangs there never does.
_KILL_PATIENCE_S = 10.0
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class SignalInbox:
    """Context in which ``END``, ``WARN`` and child exits are collected.

    They are read as values in a loop: handlers do nothing.
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
            # A signal ignored by nohup stays ignored, here and in the command.
            if signal.getsignal(number) is not signal.SIG_IGN:
                # The wake-up pipe gets a signal's number only if it has a handler.
                self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def wait(self, timeout_s: float) -> list[int]:
        """Return signals received since the last call or within the timeout, without SIGCHLD."""
        waiting = select.poll()  # unlike select, not limited in descriptor numbers
        waiting.register(self._read, select.POLLIN)
        if not waiting.poll(max(0.0, timeout_s) * 1000.0):
            return []
        with suppress(BlockingIOError):
            return [n for n in os.read(self._read, 4096) if n != signal.SIGCHLD]
        return []


class ProcessTree:
    """A started command and its descendants.

    Only one may exist in a process, because it reaps all children.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # In a separate session Ctrl-C reaches only us, and is forwarded once.  If we are killed,
        # the command gets SIGTERM.
        self._process = subprocess.Popen(
            list(command),
            env=dict(environ),
            start_new_session=True,
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        self.pid = self._process.pid
        self.code: int | None = None
        """Exit code of the command, minus n if signal n ended it; None while it runs."""
        self._signalled: set[int] = set()

    def reap(self) -> None:
        """Reap all children that have ended."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._signalled.discard(ended[0])
                if ended[0] == self.pid:
                    self.code = self._process.returncode = os.waitstatus_to_exitcode(ended[1])

    def send(self, number: int) -> None:
        """Send a signal to the command's process group, as a terminal would; not to workers."""
        self._signalled.update(pid for pid, (_, group) in _living().items() if group == self.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def end_orphans(self) -> None:
        """Send SIGTERM, once each, to adopted orphans.

        Workers of a live torchrun are left to it.
        """
        adopted = {pid for pid, (parent, _) in _living().items() if parent == os.getpid()}
        for pid in adopted - self._signalled - {self.pid}:
            self._signalled.add(pid)
            _kill(pid, signal.SIGTERM)

    # Without psutil, since `forerun run` needs only the standard library.
    def living_pids(self) -> set[int]:
        """Return live descendants, including the command; empty without ``/proc``."""
        self.reap()
        parents = {child: parent for child, (parent, _) in _living().items()}
        descendants: set[int] = set()
        front = {os.getpid()}
        while front:
            front = {child for child, parent in parents.items() if parent in front} - descendants
            descendants |= front
        return descendants

    def kill(self) -> None:
        """Send SIGKILL to all remaining descendants until none is left, or patience runs out."""
        end_s = time.monotonic() + _KILL_PATIENCE_S
        if self.code is None:  # later the id may belong to another group
            self.send(signal.SIGKILL)
        while ((remaining := self.living_pids()) or self.code is None) and time.monotonic() < end_s:
            for pid in remaining:
                _kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def wait_for_exit(self, numbers: Sequence[int]) -> None:
        """Wait for the command by minimal means; the given signals end it with SIGTERM.

        Fallback if watching has failed: nothing is killed, and ``code`` is the command's.
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
            except BaseException:  # such as an exception raised by a signal
                time.sleep(0.1)

    def _end_quietly(self) -> None:
        with suppress(Exception):
            if self.code is None:
                os.killpg(self.pid, signal.SIGTERM)


def _living() -> dict[int, tuple[int, int]]:
    """Return parent and process group of every process that is not a zombie."""
    processes: dict[int, tuple[int, int]] = {}
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError, IndexError, ValueError):  # the process may end while being read
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            # The process name in parentheses may contain anything.
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
