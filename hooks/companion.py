"""The pipe to the process that analyses the records: one JSON line per event, never waited for."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from .guard import is_failing

_log = logging.getLogger(__name__)
PATIENCE_S = 30.0
FAILING_S = 1.0
"""The same at the end of a process that an error ends."""
_MOST_NBYTES = 1 << 16
_MOST_LATE = 16
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_WORKER_NAMES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "ROLE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "FORERUN_CALIBRATE",
    }
)


def companion_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what makes a process a worker, and with one thread of BLAS.

    >>> companion_environment({"RANK": "3", "HOME": "/h"})
    {'HOME': '/h', 'OMP_NUM_THREADS': '1'}
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _WORKER_NAMES and not name.startswith("TORCHELASTIC_")
    }
    return {**kept, "OMP_NUM_THREADS": "1"}


class CompanionPipe:
    """Events to one companion; steps that do not fit into the pipe are dropped and counted.

    Of other events, a window's end among them, the newest few go with the next that fits.

    The pipe is a pair of sockets: writing to one whose reader has died can be done without the
    signal that ends a training process where the user has set ``SIGPIPE`` to its default.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.num_dropped = 0
        self._late: deque[bytes] = deque(maxlen=_MOST_LATE)
        self._received = b""
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    list(command), stdin=theirs.fileno(), env=companion_environment(environment)
                )
        except OSError as err:
            self._socket.close()
            _log.warning(
                "[forerun] no live answers: cannot start %s (%s); records are written",
                command[0],
                err,
            )
            return
        self._socket.setblocking(False)

    @property
    def is_alive(self) -> bool:
        """True while events can be sent."""
        return self._process is not None

    def send(self, event: Mapping[str, Any]) -> None:
        """Write one event, or drop a step, or keep what is rarer for later; never waits."""
        if self._process is None:
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
            _log.warning("[forerun] the companion has ended; records are still written")
            self._process = None
            self._socket.close()

    def _send_late(self) -> None:
        while self._late:
            self._socket.send(self._late[0], _NO_SIGNAL)
            self._late.popleft()

    def receive(self) -> list[dict[str, Any]]:
        """What the companion has written back since the last call; never waits."""
        if self._process is None:
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
        """End its input and wait for its last words; only for the end of the process."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):  # still full
            self._send_late()
        with suppress(OSError):  # it has died
            self._socket.shutdown(socket.SHUT_WR)  # a forked child may hold the socket too
        try:
            process.wait(min(timeout_s, FAILING_S) if is_failing() else timeout_s)
        except subprocess.TimeoutExpired:
            _log.warning("[forerun] the companion still works at the end; it is left alone")
        finally:
            self._socket.close()
