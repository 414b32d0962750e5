"""Trainings of ``tests/support/hands_loop.py`` as commands: with our flag, and without."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SUPPORT = Path(__file__).parents[2] / "tests" / "support"
if str(SUPPORT) not in sys.path:
    sys.path.insert(0, str(SUPPORT))

from hands_loop import Case  # noqa: E402
from hands_runs import (  # noqa: E402
    Outcome,
    differences,
    flags,
    missing_records,
    outcome,
    worker_environments,
)

TIMEOUT_S = 300.0
_OURS = ("FORERUN", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


@dataclass(frozen=True, slots=True)
class Compared:
    """Both outcomes of a case, and one line for each violation."""

    bare: Outcome
    watched: Outcome
    problems: tuple[str, ...]


def compare(case: Case, home: Path, *, fewest: int | None = None, **environ: str) -> Compared:
    """Train the case in two processes at the same time, in folders below ``home``.

    ``fewest`` hooked steps suffice if some may be given up.
    """
    started = [
        _start(case, home / name, is_watched=name == "watched", **environ)
        for name in ("without", "watched")
    ]
    ends = [tuple(_wait(process) for process in processes) for processes in started]
    bare, watched = (
        outcome(home / name, exits)
        for name, exits in zip(("without", "watched"), ends, strict=True)
    )
    problems = differences(bare, watched)
    if any(bare.exits):
        problems.append(f"ends with {bare.exits} without us; see {home / 'without' / 'log-0.txt'}")
    if not any(watched.exits):
        problems += missing_records(home / "watched" / "calibrated", case, fewest=fewest)
    return Compared(bare, watched, tuple(problems))


def _start(
    case: Case, home: Path, *, is_watched: bool, **environ: str
) -> list[subprocess.Popen[bytes]]:
    home.mkdir(parents=True)
    forerun_options = flags(home / "calibrated") if is_watched else ()
    command = [
        sys.executable,
        str(SUPPORT / "hands_loop.py"),
        case.name,
        str(home),
        *forerun_options,
    ]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    inherited |= {"OMP_NUM_THREADS": "1"}
    processes = []
    for place in worker_environments(case.num_ranks, **environ):
        with (home / f"log-{place['RANK']}.txt").open("wb") as log:
            env = {**inherited, **place}
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=home))
    return processes


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
