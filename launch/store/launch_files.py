"""What a wrapped launch and its wrapper tell each other, in a folder of this launch alone."""

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

from ...calib.records import LAUNCH, LONGEST_S, MARKER, PRIVATE, RUNS, replace_file, with_iso_times
from ...hooks.process import LAUNCH_ID, is_launch_id, new_launch_id, safe_launch_id
from .publishing import FORECAST, ForecastFile, typed
from .run_folders import command_words, finite_number, read_object

STOP_REQUEST = "stop-request.json"
"""The wrapper: please save and stop, since the scheduler soon ends this job."""
REQUEST_RULE = "request"
"""The rule of a stop that the wrapper asked for."""
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""From here on Slurm's numbers of steps mean the batch script and the like."""
_READ = (LAUNCH, MARKER, FORECAST, "decision.json")


def launch_id(environ: Mapping[str, str]) -> str:
    """The id that a wrapper gives its command: the one that is set, else a new one.

    All tasks of one step of a Slurm job make the same.  An id that was made in another job, as
    where a job submits the next one, is not taken over.
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
    # One batch script or shell may start several launches, at once or in turn.
    return safe_launch_id(f"{of_job}-{secrets.token_hex(3)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What ``stop.json`` says."""

    run_id: str = ""
    iteration: int | None = None
    unix_s: float = 0.0
    reason: str = ""
    rule: str = ""
    command: tuple[str, ...] = ()

    @property
    def is_advised(self) -> bool:
        """False where the scheduler's limit was the reason: such a run is to be taken up again."""
        return self.rule != REQUEST_RULE


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestForecast:
    """What the newest forecast of a launch says, from ``forecast.json`` and ``request.json``."""

    now_unix_s: float
    """Names the forecast; times are counted by the clock of who read it."""
    remaining_p95_s: float
    """Time that is left with 5 % beyond it, when the forecast was made."""
    remaining_p50_s: float
    done_frac: float
    """Share of the steps that were done then."""
    longest_save_s: float

    def remaining_s(self, age_s: float) -> float:
        """Remaining time (P95) ``age_s`` later, where training has gone on until then."""
        return max(0.0, self.remaining_p95_s - max(0.0, age_s))

    def done_frac_after(self, age_s: float) -> float:
        """Share of the steps that will be done so much later, at the expected speed."""
        if self.remaining_p50_s <= 0:
            return 1.0
        gone = min(1.0, max(0.0, age_s) / self.remaining_p50_s)
        return self.done_frac + (1.0 - self.done_frac) * gone


class LaunchFiles:
    """Reads what carries the id of the launch, in its folder; all else is as if it were not there.

    An id may be used again, as where the user sets one: what lies there at the beginning is of an
    earlier launch.
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
        """Note what an earlier launch of this id has left, and take its request back."""
        for name in _READ:
            path = self.folder / name
            if (mark := _mark(path)) is not None:
                self._before[path] = mark
        self.withdraw()

    def follow(self) -> None:
        """Go over to the id that the ranks agreed on, where that is another node's."""
        launch = self._new(self._runs / self._given_id / LAUNCH) or {}
        if is_launch_id(agreed := launch.get("launch_id")):
            self.launch_id = str(agreed)

    def ask(self, reason: str) -> None:
        """A request to save and stop, where there is none yet; raises ``OSError``."""
        path = self.folder / STOP_REQUEST
        value = read_object(path)
        if value is not None and value.get("launch_id") == self.launch_id:
            return
        # Not before the session began, whatever the clock has been set to since.
        unix_s = max(time.time(), self._begun_unix_s + time.monotonic() - self._begun_s)
        value = {"schema": 1, "launch_id": self.launch_id, "unix_s": unix_s, "reason": reason}
        value["rule"] = REQUEST_RULE
        replace_file(path, json.dumps(with_iso_times(value)) + "\n", mode=PRIVATE)

    def withdraw(self) -> None:
        """No request is left for a later launch of this id."""
        with suppress(OSError):
            (self.folder / STOP_REQUEST).unlink()

    def stop(self) -> Stopped | None:
        """The stop of this launch; None where there was none."""
        value = self._read(MARKER)
        if value is None:
            return None
        iteration = value.get("iteration")
        texts = {name: str(value.get(name, "")) for name in ("run_id", "reason", "rule")}
        return Stopped(
            iteration=iteration if isinstance(iteration, int) else None,
            unix_s=finite_number(value.get("unix_s")),
            command=command_words(value.get("command")),
            **texts,
        )

    def forecast(self) -> NewestForecast | None:
        """The newest forecast of this launch; None before there is one."""
        forecast_file = typed(ForecastFile, self._read(FORECAST) or {})
        done, remaining = forecast_file.steps_done, forecast_file.steps_left
        if remaining <= 0:
            return None
        saves = (self._read("request.json") or {}).get("save_times_s")
        longest_s = max(map(_time_s, saves), default=0.0) if isinstance(saves, list) else 0.0
        return NewestForecast(
            now_unix_s=forecast_file.now_unix_s,
            remaining_p95_s=_time_s(forecast_file.remaining_high_s),
            remaining_p50_s=_time_s(forecast_file.remaining_s),
            done_frac=done / (done + remaining),
            longest_save_s=longest_s,
        )

    def advised_command(self) -> tuple[str, ...]:
        """The command line with the advised layout from ``decision.json``; empty without one."""
        return command_words((self._read("decision.json") or {}).get("command"))

    def _read(self, name: str) -> Mapping[str, Any] | None:
        value = self._new(self.folder / name)
        return value if value is not None and value.get("launch_id") == self.launch_id else None

    def _new(self, path: Path) -> Mapping[str, Any] | None:
        mark = _mark(path)
        return None if mark is None or mark == self._before.get(path) else read_object(path)


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Changes when a file is replaced, without regard to what the clock says."""
    try:
        file_stat = os.lstat(path)
    except (OSError, ValueError):
        return None
    return file_stat.st_ino, file_stat.st_mtime_ns, file_stat.st_size


def _time_s(value: object) -> float:
    return max(0.0, finite_number(value, LONGEST_S))
