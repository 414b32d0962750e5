"""Content of ``status.json``, and whether the companion that wrote it is alive.

Standard library only: the companion writes it before it loads anything else.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...calib.records.files import CREATED
from ...calib.records.iso_times import with_iso_times
from ...calib.workload.config_json import encode_fields
from ...hooks.process.launch_identity import boot_id, process_start
from .run_folders import decoded_or_empty

STATUS = "status.json"
SCHEMA = 1
BEAT_S = 30.0
"""Seconds between renewals of the file while nothing happens."""
STALE_S = 120.0
"""Age in seconds at which another machine's file no longer shows that its companion lives."""


class Phase(Enum):
    """Phase of a run, as known to its companion."""

    RUNS = "runs"
    ENDED = "ended"
    """Training reported its end."""
    GONE = "gone"
    """Training disappeared without reporting an end."""
    LOGGED = "logged"
    """Steps were read from a log, which does not show whether training still runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFile:
    """Content of the status file, without run and launch ids."""

    phase: Phase = Phase.RUNS
    iteration: int = 0
    """Steps done."""
    steps_total: int = 0
    """Steps of the whole run; 0 if unknown."""
    step_time_s: float = 0.0
    """Median of the newest regular steps; 0.0 before the first."""
    step_low_s: float = 0.0
    """Lower end of the range of 9 in 10 of these steps."""
    step_high_s: float = 0.0
    """Upper end of that range."""
    num_steps: int = 0
    """Number of these steps."""
    began_unix_s: float = 0.0
    heard_unix_s: float = 0.0
    """Time of the last event from training."""
    unix_s: float = 0.0
    """Time of writing."""
    host: str = ""
    """Host of the writing process; ``pid`` and ``pid_start`` identify it there."""
    pid: int = 0
    pid_start: int = 0

    def to_json(self, stamp: Mapping[str, Any]) -> dict[str, Any]:
        """Return the file's content, which begins with the stamp of its run."""
        return with_iso_times({"schema": SCHEMA, **CREATED, **stamp, **encode_fields(self)})

    def is_live(self, now_unix_s: float) -> bool:
        """True if training runs and the companion that wrote this is alive."""
        if self.phase is not Phase.RUNS or self.unix_s <= 0:
            return False
        if self.host != this_host():
            return abs(now_unix_s - self.unix_s) < STALE_S
        start = process_start(self.pid) if 0 < self.pid < 2**31 else None
        return start is not None and start == self.pid_start


def status_of(value: Mapping[str, Any]) -> StatusFile:
    """Return the status in a file's object; an unknown phase is read as ``GONE``."""
    known = [phase.value for phase in Phase]
    phase = value.get("phase") if value.get("phase") in known else Phase.GONE
    return decoded_or_empty(StatusFile, {**value, "phase": phase})


def this_host() -> str:
    """Return host name, boot id and pid namespace, within which a process id is valid."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return " ".join(filter(None, (socket.gethostname(), boot_id(), space)))
