"""Runs every fault twice, with us and without, each in its own processes, and reads the results.

One process imports torch and Megatron and forks for every run, so that a run costs what its
training costs and its exit status is real.

    python tests/support/fault_runs.py FOLDER [NAME ...]
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from free_ports import free_port

ROOT = Path(__file__).parents[2]
RUN_ID = "fault"
PATIENCE_S = 90.0
NUM_AT_ONCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Results of one run per rank; ``status`` is that of ``subprocess``, None if it hung."""

    status: tuple[int | None, ...]
    losses: tuple[tuple[str, ...], ...]
    errors: tuple[str, ...]
    remaining_hooks: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Readable records of rank 0 afterwards."""

    steps: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    """Hooked steps with as many operators as in a run without faults."""
    partial: tuple[int, ...] = ()
    """Hooked steps with fewer."""
    faulted: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    num_collectives: int = field(default=0, compare=False)
    problems: tuple[str, ...] = field(default=(), compare=False)


@dataclass(slots=True)
class _Running:
    folder: Path
    pids: dict[int, int]
    until_s: float
    begun_s: float
    status: dict[int, int | None] = field(default_factory=dict)


def main(folder: Path, names: list[str]) -> None:
    """Run all faults (or those named) and their twins."""
    sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "tests" / "support")]
    os.environ.update(OMP_NUM_THREADS="1", FORERUN_DEVICE="cpu", WANDB_MODE="disabled")
    import pretrain_gpt  # noqa: F401  the imports that all runs share
    from fault_cases import FAULTS

    sys.argv[1:] = []
    gc.collect()
    gc.freeze()  # or every child would look through all of it at its end
    running: list[_Running] = []
    done: set[Path] = set()
    for fault in FAULTS:
        if names and fault.name not in names and not fault.is_control:
            continue
        for is_bare in (True, False):
            home = run_folder(folder, fault, is_bare=is_bare)
            if home in done:
                continue
            done.add(home)
            while len(running) >= NUM_AT_ONCE:
                _collect(running)
            running.append(_start(fault, home, is_bare=is_bare))
    while running:
        _collect(running)


def run_folder(folder: Path, fault: Any, *, is_bare: bool) -> Path:
    """Return the folder of a run; runs that are the same without us share one."""
    if not is_bare:
        return folder / slug(fault.name)
    act = getattr(fault.act, "__name__", "plain") if fault.act else "plain"
    return folder / f"bare-{fault.loop.__name__}-{fault.num_ranks}-{act}"


def slug(name: str) -> str:
    """Return a file name for a name."""
    return "".join(c if c.isalnum() else "-" for c in name)


def _start(fault: Any, home: Path, *, is_bare: bool) -> _Running:
    home.mkdir(parents=True)
    port = free_port()
    pids = {}
    for rank in range(fault.num_ranks):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _train(fault, home, rank, port, is_bare=is_bare)
            sys.exit(0)
        pids[pid] = rank
    now_s = time.monotonic()
    return _Running(folder=home, pids=pids, until_s=now_s + PATIENCE_S, begun_s=now_s)


def _train(fault: Any, home: Path, rank: int, port: int, *, is_bare: bool) -> None:
    # A shell that starts tests in the background has them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(home / f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(fault.num_ranks),
        LOCAL_WORLD_SIZE=str(fault.num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    training = fault.loop(home, rank, fault.act, None if is_bare else fault.strike)
    if not is_bare:
        training.is_bare = False
        fault.put_in_place(training)
    training.run()


def _collect(running: list[_Running]) -> None:
    """Wait briefly for any run to end."""
    time.sleep(0.02)
    for run in list(running):
        for pid, rank in list(run.pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended == 0 and time.monotonic() > run.until_s:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                run.status[rank] = None
            elif ended == 0:
                continue
            else:
                run.status[rank] = os.waitstatus_to_exitcode(status)
            del run.pids[pid]
        if not run.pids:
            running.remove(run)
            took_s = time.monotonic() - run.begun_s
            status = [run.status[rank] for rank in sorted(run.status)]
            end = {"status": status, "took_s": round(took_s, 2)}
            (run.folder / "run.json").write_text(json.dumps(end))


def seen(home: Path) -> Seen:
    """Return the results of a run."""
    run = json.loads((home / "run.json").read_text())
    ranks = range(len(run["status"]))
    ends = [_end(home / f"end-{rank}.json") for rank in ranks]
    losses = [(home / f"losses-{rank}.txt").read_text().splitlines() for rank in ranks]
    return Seen(
        status=tuple(run["status"]),
        losses=tuple(tuple(lines) for lines in losses),
        errors=tuple(end["error"] for end in ends),
        remaining_hooks=tuple(name for end in ends for name in end["left"]),
        random=tuple(end["random"] for end in ends),
        took_s=run["took_s"],
    )


def _end(path: Path) -> dict[str, Any]:
    """Return a rank's end, with empty fields if the process was killed before it wrote any."""
    if not path.exists():
        return {"error": "killed", "left": [], "random": ""}
    return json.loads(path.read_text())


def rows(home: Path, *, operators: int) -> Rows:
    """Return readable records; ``operators`` is the number of a hooked step without faults."""
    from forerun.calib.errors import RecordError
    from forerun.calib.records.record_kinds import (
        CollectiveRecord,
        OperatorRecord,
        StepFlag,
        StepRecord,
        WindowRecord,
    )
    from forerun.calib.samples.store import read_run

    for path in (home / "out").glob("records/*/*"):
        if not path.is_file():
            path.unlink()  # a device or a pipe: nothing was kept there, and reading has no end
    try:
        run = read_run(home / "out", RUN_ID)
    except RecordError as err:
        return Rows(problems=(str(err),))
    records = run.records.get(0, ())
    counts = Counter(r.step for r in records if isinstance(r, OperatorRecord))
    steps = [r for r in records if isinstance(r, StepRecord)]
    return Rows(
        steps=tuple(r.step for r in steps),
        whole=tuple(step for step, count in counts.items() if count == operators),
        partial=tuple(step for step, count in counts.items() if count != operators),
        faulted=tuple(r.step for r in steps if StepFlag.FAULTED in r.flags),
        windows=tuple(r.window for r in records if isinstance(r, WindowRecord)),
        num_collectives=sum(isinstance(r, CollectiveRecord) for r in records),
        problems=run.problems,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
