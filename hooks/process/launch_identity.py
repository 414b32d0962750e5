"""Name of a launch, which all its files and messages carry.

``forerun run``, or the user, gives it as ``FORERUN_LAUNCH_ID``.  Otherwise it is the launcher's run
id with a digest of the start.  Rank 0 writes it to the process group's store once, and the others
read it there; nobody waits inside the store.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ...calib.errors import unwritable
from ...calib.records.files import replace_file
from ...calib.records.run_values import LAUNCH, RUNS
from .guard import is_failing
from .settings import Settings
from .votes import StoreLink, find_link

_log = logging.getLogger(__name__)
LAUNCH_ID = "FORERUN_LAUNCH_ID"
SCHEMA = 1
PATIENCE_S = 30.0
"""Timeout for the name of rank 0; after it, a rank goes by its run id."""
LAST_PATIENCE_S = 5.0
"""Timeout for the name of rank 0 at the end of the process."""
RANKS_PER_S = 500
"""Limit on polls of the store per second, over all ranks."""
_KEY = "launch"
_RUNS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
_IS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_TICK_S = 0.1


def launch_folder(directory: Path, launch_id: str) -> Path:
    """Return the folder of all files to and from one launch."""
    return directory / RUNS / launch_id


def is_launch_id(text: object) -> bool:
    """Return True for letters, digits, ``._-``, at most 64, neither hidden nor a path upwards."""
    return isinstance(text, str) and _IS_NAME.fullmatch(text) is not None


def safe_launch_id(text: str) -> str:
    """Return ``text`` if it is a valid folder name, else a safe name unique to it.

    >>> safe_launch_id("nightly-7")
    'nightly-7'
    """
    if is_launch_id(text):
        return text
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-_")[:48]
    return f"{safe}-{digest}" if safe else digest


def new_launch_id() -> str:
    """Return a unique name of UTC time and random digits."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + secrets.token_hex(4)


def launch_name(environ: Mapping[str, str]) -> str:
    """Return the name that this process, as rank 0, gives its launch.

    Under torchrun the start is that of the agent, which outlives restarts of its ranks; a second
    launch with the same run id has another one, and so has each launch with the default ``none``.
    """
    if given := environ.get(LAUNCH_ID, ""):
        return safe_launch_id(given)
    pid = os.getppid() if environ.get(_RUNS[0]) else os.getpid()
    start = process_start(pid)
    if start is None:
        return new_launch_id()
    host = socket.gethostname()
    name = next((text for n in _RUNS if (text := environ.get(n, "")) not in ("", "none")), host)
    digest = hashlib.sha256(f"{host} {boot_id()} {pid} {start}".encode()).hexdigest()
    return safe_launch_id(f"{name}-{digest[:12]}")


def process_start(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot.

    None if it has ended or the time is unknown.
    """
    try:
        fields = _fields_of(pid)
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def is_stopped(pid: int) -> bool:
    """Return True for a process that a signal has stopped and none has continued."""
    try:
        return _fields_of(pid)[0] == "T"
    except (OSError, IndexError):
        return False


def _fields_of(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the process's name, its state first."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return text.rpartition(")")[2].split()


def boot_id() -> str:
    """Return the random ID of this boot; empty if unknown."""
    with suppress(OSError, UnicodeDecodeError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


class LaunchIdentity:
    """Name of the launch on one rank: the writer's thread calls ``poll`` and ``settle``.

    ``name`` may be read anywhere.  Only ranks that need it ask: rank 0, which gives it, the
    companion's rank, those that log, and the first of a node whose wrapper has given another name.
    """

    def __init__(self, settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
        self._rank = settings.rank
        self._directory = settings.directory
        given = environ.get(LAUNCH_ID, "")
        self._given = safe_launch_id(given) if given else ""
        self._name_of_first = "" if self._rank.rank else launch_name(environ)
        self._is_needed = False
        self._link: StoreLink | None = None
        self._next_s = 0.0
        self._begun_s = 0.0
        self._pause_s = max(_TICK_S, self._rank.world_size / RANKS_PER_S)
        self.name = ""
        """Name of the launch; empty until it is known."""

    def begin(self, *, is_needed: bool) -> None:
        """Begin training; ``is_needed``: this rank uses the name."""
        has_wrapper = bool(self._given) and self._rank.local_rank == 0
        self._begun_s = time.monotonic()
        self._is_needed = is_needed or has_wrapper or self._rank.rank == 0

    def poll(self) -> None:
        """Ask the store once, if that is due."""
        now_s = time.monotonic()
        if self.name or not self._is_needed or now_s < self._next_s:
            return
        waited_s = now_s - self._begun_s
        self._look(is_last=waited_s > PATIENCE_S + self._rank.world_size / RANKS_PER_S)
        self._next_s = time.monotonic() + self._pause_s

    def settle(self, patience_s: float = LAST_PATIENCE_S) -> None:
        """Wait briefly for the name at the end of the process, then continue without rank 0's."""
        until_s = time.monotonic() + (1.0 if is_failing() else patience_s)
        while self._is_needed and not self.name:
            is_last = time.monotonic() >= until_s
            self._look(is_last=is_last)
            if not self.name and not is_last:
                time.sleep(_TICK_S)

    def _look(self, *, is_last: bool) -> None:
        name = self._name_of_first if self._rank.world_size == 1 else ""
        if not name:
            with suppress(OSError, RuntimeError, UnicodeDecodeError):  # the store is unreachable
                name = self._shared_name()
            if not name and is_last:
                name = self._given or self._rank.run_id  # the same on all ranks
        if name:
            self._take(safe_launch_id(name))

    def _shared_name(self) -> str:
        """Return the name in the store, where rank 0 writes it; empty if there is none yet, or no
        store."""
        self._link = self._link or find_link(self._rank.run_id)
        if self._link is None:
            return ""
        store = self._link.connect()
        if self._name_of_first:
            store.set(_KEY, self._name_of_first)
            return self._name_of_first
        return store.get(_KEY).decode() if store.check([_KEY]) else ""

    def _take(self, name: str) -> None:
        if self._given and self._given != name and self._rank.local_rank == 0:
            path = launch_folder(self._directory, self._given) / LAUNCH
            try:
                replace_file(path, json.dumps({"schema": SCHEMA, "launch_id": name}) + "\n")
            except OSError as err:
                _log.warning("[forerun] %s", unwritable(path, err))
        self.name = name
