"""Trainings of ``hands_loop.py``, each in processes of its own: with our flag, and without."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hands_loop
from free_ports import free_port
from hands_loop import WINDOW, Case
from launched import Launch

from forerun.calib.records.record_kinds import OperatorRecord, StepRecord
from forerun.calib.samples.store import read_run

QUIET = ("--calibrate-python=/bin/true", "--calibrate-wandb=off", "--calibrate-tensorboard=off")
TIMEOUT_S = 120.0
MOST_SHOWN = 3
"""Most differences reported of one list."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a training: exit codes, notes of each rank, and digests of files."""

    exits: tuple[int, ...]
    ended: dict[str, Any]
    files: dict[str, str]


def flags(directory: Path) -> tuple[str, ...]:
    """Return flags of a calibrated run without a companion or writers."""
    options = (f"--calibrate-steps={WINDOW}", f"--calibrate-dir={directory}")
    return ("--calibrate", *options, *QUIET)


def worker_environments(num_ranks: int, **extra: str) -> list[dict[str, str]]:
    """Return the environment of each worker."""
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WANDB_MODE": "disabled",
        **extra,
    }
    return [{**shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(num_ranks)]


class Pair:
    """One case run twice at the same time; ``outcomes`` are those without and with the flag."""

    def __init__(self, case: Case, directory: Path, **extra: str) -> None:
        self._homes = (directory / "without", directory / "watched")
        self._launches = [
            [
                _launch(case, home, environ, is_watched=home is self._homes[1])
                for environ in worker_environments(case.num_ranks, **extra)
            ]
            for home in self._homes
        ]
        self.outputs: list[str] = []
        self.records = directory / "watched" / "calibrated"

    def outcomes(self) -> tuple[Outcome, Outcome]:
        """Wait for both runs and return their outcomes."""
        bare, watched = (
            self._outcome(home, launches)
            for home, launches in zip(self._homes, self._launches, strict=True)
        )
        return bare, watched

    def _outcome(self, home: Path, launches: Sequence[Launch]) -> Outcome:
        done = [launch.wait() for launch in launches]
        self.outputs.append("".join(one.stdout + one.stderr for one in done))
        return outcome(home, tuple(one.returncode for one in done))


def _launch(case: Case, home: Path, environ: dict[str, str], *, is_watched: bool) -> Launch:
    home.mkdir(exist_ok=True)
    options = flags(home / "calibrated") if is_watched else ()
    words = (hands_loop.__file__, case.name, home, *options)
    variables: dict[str, Any] = {**environ}
    return Launch(home, *words, timeout_s=TIMEOUT_S, **variables)


def outcome(home: Path, exits: tuple[int, ...]) -> Outcome:
    """Return the results that ranks have written to ``home``."""
    ended = {p.name: json.loads(p.read_text()) for p in sorted(home.glob("ended-*.json"))}
    files = {
        str(path.relative_to(home)): _digest(path)
        for path in sorted((home / "files").rglob("*"))
        if path.is_file()
    }
    return Outcome(exits, ended, files)


def _digest(path: Path) -> str:
    """Return the digest of a file, except of ``.metadata``: torch draws a name for each."""
    if path.name == ".metadata":
        return "there"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def differences(bare: Outcome, watched: Outcome) -> list[str]:
    """Return one line per difference; for lists, the first places that differ."""
    results = []
    if bare.exits != watched.exits:
        results.append(f"exit codes: {bare.exits} without us, {watched.exits} with us")
    for rank in sorted({*bare.ended, *watched.ended}):
        one, other = bare.ended.get(rank), watched.ended.get(rank)
        if one is None or other is None:
            results.append(f"{rank}: written only {'with' if one is None else 'without'} us")
        else:
            results += [f"{rank}: {text}" for text in _unequal(one, other)]
    results += [f"files: {text}" for text in _unequal(bare.files, watched.files)]
    return results


def _unequal(bare: Any, watched: Any, place: str = "") -> list[str]:
    if bare == watched:
        return []
    if isinstance(bare, dict) and isinstance(watched, dict):
        names = [*bare, *(name for name in watched if name not in bare)]
        each = (_unequal(bare.get(n), watched.get(n), f"{place} {n}".strip()) for n in names)
        return [text for texts in each for text in texts]
    if isinstance(bare, list) and isinstance(watched, list) and len(bare) == len(watched):
        each = enumerate(zip(bare, watched, strict=True))
        unlike = [(i, *pair) for i, pair in each if pair[0] != pair[1]][:MOST_SHOWN]
        generator = (_unequal(one, other, f"{place}[{i}]") for i, one, other in unlike)
        return [text for texts in generator for text in texts][:MOST_SHOWN]
    return [f"{place}: {str(bare)[:200]} without us, {str(watched)[:200]} with us"]


def missing_records(directory: Path, case: Case, *, fewest: int | None = None) -> list[str]:
    """Return records that a calibrated run of this case should have and this one lacks.

    ``fewest`` hooked steps are enough if some may be given up.
    """
    result = read_run(directory).records
    lines = []
    for rank in range(case.num_ranks):
        records = result.get(rank, ())
        steps = [r.step for r in records if isinstance(r, StepRecord) and r.is_hooked]
        enough = case.num_hooked if fewest is None else fewest
        if not enough <= len(steps) <= case.num_hooked:
            lines.append(f"rank {rank}: hooked steps {steps}, not {case.num_hooked}")
        num_operators = sum(isinstance(r, OperatorRecord) for r in records)
        if case.has_operators and not num_operators:
            lines.append(f"rank {rank}: no operators")
    return lines
