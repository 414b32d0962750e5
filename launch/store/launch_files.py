"""Files by which a wrapped launch and its wrapper communicate, in the folder of the launch."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...calib.forecast.forecast_record import Forecast
from ...calib.records.files import PRIVATE, replace_file
from ...calib.records.iso_times import LONGEST_S, with_iso_times
from ...calib.records.run_values import LAUNCH, MARKER, RUNS
from ...hooks.process.host_wandb import FORECAST
from ...hooks.process.launch_identity import LAUNCH_ID, is_launch_id, new_launch_id, safe_launch_id
from .run_folders import DECISION, command_words, decoded_or_empty, finite_number, read_object

STOP_REQUEST = "stop-request.json"
"""Request of the wrapper to save and stop, because the scheduler is about to end the job."""
REQUEST_RULE = "request"
"""Rule of a stop that the wrapper requested."""
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""First of Slurm's reserved step ids, for the batch script and the like."""
_READ = (LAUNCH, MARKER, FORECAST, DECISION)


def launch_id(environ: Mapping[str, str]) -> str:
    """Return the launch id that a wrapper gives its command: the one that is set, else a new one.

    All tasks of one Slurm job step get the same id.  An id from another job, for example if a job
    submits the next one, is not reused.
    """
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ""
    of_job = f"slurm-{job}-{environ.get('SLURM_RESTART_COUNT') or '0'}" if job else ""
    given = environ.get(LAUNCH_ID, "")
    if given and not (of_job and given.startswith("slurm-") and not given.startswith(of_job)):
        return safe_launch_id(given)
    if not of_job:
        return new_launch_id()
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP:
        return safe_launch_id(f"{of_job}-{step}")
    # A batch script or shell may start several launches, concurrently or in turn.
    return safe_launch_id(f"{of_job}-{secrets.token_hex(3)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """Content of ``stop.json``."""

    run_id: str = ""
    iteration: int | None = None
    unix_s: float = 0.0
    reason: str = ""
    rule: str = ""
    command: tuple[str, ...] = ()

    @property
    def is_advised(self) -> bool:
        """False if the scheduler's limit was the reason: such a run should be resumed."""
        return self.rule != REQUEST_RULE


class LaunchFiles:
    """Files in a launch's folder; those without the launch's id are ignored.

    An id may be reused, for example if the user sets one: files present at the beginning belong to
    an earlier launch.
    """

    def __init__(self, directory: Path, launch_id: str) -> None:
        self._runs = directory / RUNS
        self._given_id = launch_id
        self.launch_id = launch_id
        self._before: dict[Path, tuple[int, int, int]] = {}
        self._begun_unix_s, self._begun_s = time.time(), time.monotonic()

    @property
    def folder(self) -> Path:
        """``DIR/runs/<launch id>``."""
        return self._runs / self.launch_id

    def begin(self) -> None:
        """Mark files of an earlier launch with this id, and withdraw its request."""
        for name in _READ:
            path = self.folder / name
            if (mark := _mark(path)) is not None:
                self._before[path] = mark
        self.withdraw()

    def follow(self) -> None:
        """Adopt the id that the ranks agreed on, which may be another node's."""
        launch = self._new(self._runs / self._given_id / LAUNCH) or {}
        if is_launch_id(agreed := launch.get("launch_id")):
            self.launch_id = str(agreed)

    def ask(self, reason: str) -> None:
        """Request a save and stop, unless already requested; raises ``OSError``."""
        path = self.folder / STOP_REQUEST
        value = read_object(path)
        if value is not None and value.get("launch_id") == self.launch_id:
            return
        # Never earlier than the session's start, even if the clock was set back.
        unix_s = max(time.time(), self._begun_unix_s + time.monotonic() - self._begun_s)
        value = {"schema": 1, "launch_id": self.launch_id, "unix_s": unix_s, "reason": reason}
        value["rule"] = REQUEST_RULE
        self.withdraw()  # whatever is in its place must not keep training from saving
        replace_file(path, json.dumps(with_iso_times(value)) + "\n", mode=PRIVATE)

    def withdraw(self) -> None:
        """Remove the request, so that no later launch of this id sees it."""
        with suppress(OSError):
            (self.folder / STOP_REQUEST).unlink()

    def stop(self) -> Stopped | None:
        """Return the stop of this launch; None if there was none."""
        value = self._read(MARKER)
        if value is None:
            return None
        command = command_words(value.get("command"))
        return decoded_or_empty(Stopped, {**value, "command": command})

    def forecast(self) -> Forecast | None:
        """Return the newest forecast of this launch; None before the first."""
        newest = decoded_or_empty(Forecast, self._read(FORECAST))
        return newest if newest.steps_left > 0 and newest.remaining_high_s <= LONGEST_S else None

    def longest_save_s(self) -> float:
        """Return the time of the longest save of this launch; 0 before the first."""
        saves = (self._read("request.json") or {}).get("save_times_s")
        times = saves if isinstance(saves, list) else []
        return max(0.0, *(finite_number(one, LONGEST_S) for one in (0.0, *times)))

    def advised_command(self) -> tuple[str, ...]:
        """Return the command line with the advised layout from ``decision.json``; empty without
        one."""
        return command_words((self._read(DECISION) or {}).get("command"))

    def _read(self, name: str) -> Mapping[str, Any] | None:
        value = self._new(self.folder / name)
        return value if value is not None and value.get("launch_id") == self.launch_id else None

    def _new(self, path: Path) -> Mapping[str, Any] | None:
        mark = _mark(path)
        return None if mark is None or mark == self._before.get(path) else read_object(path)


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Return a mark that changes when a file is replaced, independent of the clock."""
    try:
        file_stat = os.lstat(path)
    except (OSError, ValueError):
        return None
    return file_stat.st_ino, file_stat.st_mtime_ns, file_stat.st_size
