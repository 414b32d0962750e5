"""The pipe to the process that analyses the records: one JSON line per event, never waited for."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

_log = logging.getLogger(__name__)
PATIENCE_S = 30.0
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
    """Events to one companion; what does not fit into the pipe at once is dropped and counted."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.num_dropped = 0
        try:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, env=companion_environment(environment)
            )
        except OSError as err:
            _log.warning(
                "[forerun] no live answers: cannot start %s (%s); records are written",
                command[0],
                err,
            )
            return
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    @property
    def is_alive(self) -> bool:
        """True while events can be sent."""
        return self._process is not None

    def send(self, event: Mapping[str, Any]) -> None:
        """Write one event, or drop it."""
        if self._process is None or self._process.stdin is None:
            return
        line = json.dumps(event).encode() + b"\n"
        try:
            # Lines are shorter than PIPE_BUF: the pipe takes one whole or not at all.
            os.write(self._process.stdin.fileno(), line)
        except BlockingIOError:
            self.num_dropped += 1
        except OSError:
            _log.warning("[forerun] the companion has ended; records are still written")
            self._process = None

    def close(self, timeout_s: float = PATIENCE_S) -> None:
        """Close its input and wait for its last words; only for the end of the process."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _log.warning("[forerun] the companion still works after %.0f s; left alone", timeout_s)
