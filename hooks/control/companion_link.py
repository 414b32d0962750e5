"""Pipe to the companion, which analyses the records: one JSON line per event, never waited for."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..process.free_memory import LEAST_NBYTES, free_nbytes, make_first_to_go
from ..process.guard import is_failing
from ..process.launch_identity import is_stopped

_log = logging.getLogger(__name__)
# An analysis takes seconds; launchers kill lingering processes after 30 s to 5 min.
PATIENCE_S = 30.0
FAILING_S = 1.0
"""Patience at the end of a process that exits with an error."""
LOOK_S = 0.5
"""Polling interval while waiting for the companion: a stopped one never ends."""
SETTINGS_FD = "--settings-fd"
"""Option whose value is the file descriptor from which the companion reads its settings."""
SETTINGS_S = 30.0
"""Timeout for the companion to read its settings."""
# Bytes per call: the default capacity of a pipe on Linux.
_MOST_NBYTES = 1 << 16
_SEND_BUFFER_NBYTES = 1 << 19
"""Socket buffer for events and settings that the companion has not read yet."""
_MOST_LATE = 16
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_WORKER_NAMES = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "FORERUN_CALIBRATE",
})  # fmt: skip
# The last two say where the user allows bytecode to be written.
_PYTHON_NAMES = frozenset({
    "PYTHONPATH", "PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONUSERBASE", "PYTHONNOUSERSITE",
    "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX",
})  # fmt: skip


def companion_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of a rank, and with one BLAS thread.

    Of those that change Python, only places of packages remain, without the working directory.

    >>> companion_environment({"RANK": "3", "PYTHONPATH": ":/p:.", "PYTHONINSPECT": "1"})
    {'PYTHONPATH': '/p', 'OMP_NUM_THREADS': '1'}
    """
    inherited = {
        name: value
        for name, value in environment.items()
        if name not in _WORKER_NAMES and not name.startswith("TORCHELASTIC_")
        if name in _PYTHON_NAMES or not name.startswith("PYTHON")
    }
    if "PYTHONPATH" in inherited:
        places = inherited["PYTHONPATH"].split(os.pathsep)
        inherited["PYTHONPATH"] = os.pathsep.join(one for one in places if not _is_here(one))
    return {**inherited, "OMP_NUM_THREADS": "1"}


def _is_here(place: str) -> bool:
    try:
        return os.path.samefile(place or ".", ".")
    except OSError:
        return False


class CompanionPipe:
    """Event pipe to one companion; steps that do not fit into it are dropped and counted.

    The newest few of all other events, such as a window's end, are sent with the next that fits.

    The pipe is a socket pair: writing to one whose reader has died can avoid the signal that would
    end a training process in which the user has set ``SIGPIPE`` to its default.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.is_alive = False
        """True if events can be sent."""
        self.is_started = False
        """True once ``start`` has been called."""
        self.num_dropped = 0
        self._late: deque[bytes] = deque(maxlen=_MOST_LATE)
        self._received = b""
        try:
            self._socket, self._theirs = socket.socketpair()
        except OSError as err:
            _log.warning("[forerun] no live answers: %s; records are written", err)
            return
        self.is_alive = True
        self._socket.setblocking(False)
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_NBYTES)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], settings: Mapping[str, Any]
    ) -> None:
        """Start the program once and send its settings; called from the writer's thread.

        The settings use a socket pair of their own: command lines are limited in length, and every
        user of the machine can read them.
        """
        if self.is_started or not self.is_alive:
            return
        self.is_started = True
        text = json.dumps(settings).encode()
        try:
            ours, theirs = socket.socketpair()
            with ours:
                with theirs, self._theirs:
                    if (free := free_nbytes()) < LEAST_NBYTES:
                        why = f"{free >> 20} MiB are free within this job's memory limit"
                        raise OSError(errno.ENOMEM, why)
                    self._process = subprocess.Popen(
                        [*command, SETTINGS_FD, str(theirs.fileno())],
                        stdin=self._theirs.fileno(),
                        env=companion_environment(environment),
                        pass_fds=(theirs.fileno(),),
                    )
                make_first_to_go(self._process.pid)
                _hand_over(ours, text)
        except OSError as err:
            self.is_alive = False
            self._socket.close()
            _log.warning(
                "[forerun] no live answers: cannot start %s (%s); records are written",
                command[0],
                str(err),
            )

    def send(self, event: Mapping[str, Any]) -> None:
        """Write one event without waiting; if the pipe is full, drop a step but queue other events.

        Events may be sent before ``start``.
        """
        if not self.is_alive:
            return
        line = json.dumps(event).encode() + b"\n"
        try:
            self._send_late()
            # A line fits into one buffer of the socket: it is taken whole or not at all.
            self._socket.send(line, _NO_SIGNAL)
        except BlockingIOError:
            if event.get("event") == "step":
                self.num_dropped += 1
            else:
                self._late.append(line)
        except OSError:
            _log.warning(
                "[forerun] the companion has ended: no more live answers; records are still "
                "written, and forerun report analyses them"
            )
            self.is_alive = False
            self._socket.close()

    def _send_late(self) -> None:
        while self._late:
            self._socket.send(self._late[0], _NO_SIGNAL)
            self._late.popleft()

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages from the companion since the last call; never waits."""
        if not self.is_alive:
            return []
        with suppress(OSError):
            self._received += self._socket.recv(_MOST_NBYTES)
        *lines, self._received = self._received.split(b"\n")
        values: list[dict[str, Any]] = []
        for line in lines:
            with suppress(ValueError):
                values.append(json.loads(line))
        return values

    def close(self, timeout_s: float = PATIENCE_S) -> None:
        """Close its input and wait for it to finish; only at the end of the process."""
        is_alive, self.is_alive = self.is_alive, False
        if not is_alive:
            return
        with suppress(OSError):  # the buffer is still full
            self._send_late()
        with suppress(OSError):  # the companion has died
            self._socket.shutdown(socket.SHUT_WR)  # a forked child may have the socket open too
        try:
            if self._process is not None:
                most_s = min(timeout_s, FAILING_S) if is_failing() else timeout_s
                if why := _await_end(self._process, most_s):
                    _log.warning("[forerun] training is over and the companion %s", why)
        finally:
            self._socket.close()
            self._theirs.close()


def _await_end(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    """Return why the process has not ended: timeout, or stopped at two polls; empty if it has."""
    end_s, was_stopped = time.monotonic() + timeout_s, False
    while True:
        remaining_s = end_s - time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, min(remaining_s, LOOK_S)))
            return ""
        if was_stopped and is_stopped(process.pid):
            so = f"kill -CONT {process.pid} lets it finish, forerun report answers without it"
            return f"is stopped and not waited for; {so}"
        if remaining_s <= LOOK_S:
            return "still works; it finishes on its own"
        was_stopped = is_stopped(process.pid)


def _hand_over(ours: socket.socket, text: bytes) -> None:
    """Send all settings within ``SETTINGS_S``; ignore a program that does not read them."""
    ours.settimeout(SETTINGS_S)
    with suppress(OSError):
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_NBYTES)
        sent = 0
        while sent < len(text):
            sent += ours.send(text[sent : sent + _MOST_NBYTES], _NO_SIGNAL)
        ours.shutdown(socket.SHUT_WR)  # a forked child may have it open too
