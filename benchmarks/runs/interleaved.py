"""Launches that take turns: each trains for a few steps while all others are paused.

The speed of a shared machine varies from minute to minute.  Runs one after the other compare its
minutes; runs that alternate every second or so share the same ones.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from forerun.benchmarks.runs.launches import cpu_environment, step_times_s

SKIPPED = 4
"""Steps of a launch before its first turn."""
STEPS = 2
"""Whole steps per turn; the step before them was paused in the turn before."""
_START_LIMIT_S, _TURN_LIMIT_S = 120.0, 60.0
_POLL_S = 0.01


@dataclass(slots=True, kw_only=True)
class _Launch:
    process: subprocess.Popen[bytes]
    log: Path
    turns_s: list[list[float]] = field(default_factory=list)
    """Seconds of the whole steps in each turn."""

    @property
    def num_steps(self) -> int:
        return len(self.logged_s())

    def logged_s(self) -> list[float]:
        return step_times_s(self.log.read_text("utf-8", errors="replace"))

    def signal(self, number: int) -> None:
        """Signal the launcher and all processes that it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            for one in (*parent.children(recursive=True), parent):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(number)

    def runs_until(self, num_steps: int, limit_s: float) -> bool:
        """Run up to ``num_steps`` in total, then pause; return False if it ended or was too
        slow."""
        end_s = time.monotonic() + limit_s
        self.signal(signal.SIGCONT)
        while time.monotonic() < end_s and self.process.poll() is None:
            if self.num_steps >= num_steps:
                break
            time.sleep(_POLL_S)
        self.signal(signal.SIGSTOP)
        return self.process.poll() is None and self.num_steps >= num_steps


def interleaved_step_times(
    commands: Mapping[str, Sequence[str]], *, logs: Path, num_turns: int, cwd: Path | None = None
) -> dict[str, list[list[float]]]:
    """Return seconds of the whole steps of each launch in ``num_turns`` turns, whose order
    alternates; a failed launch is left out, and its log says why."""
    logs.mkdir(parents=True, exist_ok=True)
    launches: dict[str, _Launch] = {}
    try:
        for name, command in commands.items():
            one = launches[name] = _started(command, logs / f"{name.replace(' ', '-')}.log", cwd)
            if not one.runs_until(SKIPPED, _START_LIMIT_S):
                _ended(launches.pop(name))
                print(f"{name} failed: {one.log}", file=sys.stderr)
        for number in range(num_turns):
            names = list(launches)
            for name in names if number % 2 else names[::-1]:
                _turn(launches[name])
    finally:
        for one in launches.values():
            _ended(one)
    return {name: one.turns_s for name, one in launches.items()}


def _turn(one: _Launch) -> None:
    """Run one turn; the step interrupted by the pause is not counted."""
    seen = one.num_steps + 1
    one.runs_until(seen + STEPS, _TURN_LIMIT_S)
    one.turns_s.append(one.logged_s()[seen : seen + STEPS])


def _started(command: Sequence[str], log: Path, cwd: Path | None) -> _Launch:
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=cwd, start_new_session=True,
            env={**cpu_environment(), "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    return _Launch(process=process, log=log)


def _ended(one: _Launch) -> None:
    one.signal(signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.process.pid, signal.SIGKILL)
    one.process.wait()
