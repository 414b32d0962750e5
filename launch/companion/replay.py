"""A training log as a run of ours: its steps pass the companion's loop as if they were live."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...calib.errors import ConfigError
from ...calib.importers.training_log import TrainingLog
from ...calib.records.files import replace_file
from ...calib.records.record_kinds import (
    SCHEMA,
    Header,
    LoopRecord,
    Record,
    StepFlag,
    StepRecord,
    WindowRecord,
    to_dict,
)
from ...calib.workload.argument_values import Arguments
from ...hooks.process.settings import CadenceHint, CompanionSettings, RankInfo, Settings
from ..sinks.sink import Sink
from ..store.place import place_of
from ..store.run_log import LoggedStep
from ..store.status_file import Phase
from ._companion_loop import CompanionLoop
from ._status_writer import StatusWriter

UNKNOWN_DEVICE = "unknown"
_NS_PER_S, _FEW_LINES = 1e9, 2
_NUM_WINDOWS, _LEAST_OF_WINDOW = 4, 4
"""Windows that lines are divided into, so that levels can be compared; lines of each at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """A training log, and what it leaves open."""

    log: TrainingLog
    run_id: str
    end_unix_s: float
    """When the last line was written, if it has no time of its own."""
    device: str = ""
    """Name of the device; if empty, the CPU of a run over gloo, else unknown."""

    @property
    def trained_on(self) -> str:
        """Name of the device."""
        backend = self.log.arguments.get("distributed_backend")
        return self.device or ("cpu" if backend == "gloo" else UNKNOWN_DEVICE)


def replay_log(run: LoggedRun, directory: Path) -> None:
    """Write a log's run into a directory, with its answers.

    Raise ``ConfigError`` if the directory has a run of that name.
    """
    settings = _settings(run, directory)
    place = place_of(settings)
    if place.path.exists():
        raise ConfigError(
            f"{place.path} exists; give another --out, or delete that folder and "
            f"{directory / 'records' / run.run_id}"
        )
    steps = list(_steps(run))
    _write_records(run, steps, directory)
    place.note_run()
    status = StatusWriter(settings)
    loop = CompanionLoop(settings, open_sink=lambda _: Sink())
    last_unix_s = steps[-1].unix_s
    for event in _events(run.log, steps):
        loop.handle(event, last_unix_s)
        status.note(event)
    loop.poll(last_unix_s, is_final=True)
    status.end(Phase.LOGGED)
    loop.finish(last_unix_s, is_analysed=False, has_ended=False)


def _number(log: TrainingLog, name: str) -> int:
    return Arguments(log.arguments).number(name)


def _settings(run: LoggedRun, directory: Path) -> CompanionSettings:
    num_ranks = _number(run.log, "world_size") or 1
    rank = RankInfo(
        rank=0,
        world_size=num_ranks,
        local_rank=0,
        local_world_size=num_ranks,
        run_id=run.run_id,
    )
    cadence = CadenceHint(train_iters=run.log.num_steps)
    return CompanionSettings(
        settings=Settings(directory=directory, rank=rank, cadence=cadence),
        launch_id=run.run_id,
        started_unix_s=next(_steps(run)).unix_s,
    )


def _steps(run: LoggedRun) -> Iterator[LoggedStep]:
    """Yield the lines of a log, at the times that they state; without these, one after the other.

    The first has the warm-up, and those of another batch than the newest another step; of only two
    lines both count.
    """
    log, phases = run.log, _phases(run.log)
    busy_s = sum(line.num_iterations * line.time_s for line in log.lines)
    busy_s += sum(time_s for _, _, time_s in log.phases)
    now = (log.lines[-1].unix_s or run.end_unix_s) - busy_s
    newest = log.lines[-1].global_batch_size
    each = max(_LEAST_OF_WINDOW, -(-len(log.lines) // _NUM_WINDOWS))
    for place, line in enumerate(log.lines):
        is_first = place == 0 and len(log.lines) > _FEW_LINES
        is_apart = is_first or line.global_batch_size != newest
        now = line.unix_s or now + line.num_iterations * line.time_s
        flags = (StepFlag.WARMUP.value,) if is_apart else ()
        yield LoggedStep(
            iteration=line.iteration,
            window=place // each,
            time_s=line.time_s,
            unix_s=now,
            flags=flags,
        )
        now += sum(time_s for _, time_s in phases.get(line.iteration, ()))


def _phases(log: TrainingLog) -> dict[int, list[tuple[str, float]]]:
    phases: dict[int, list[tuple[str, float]]] = {}
    for at, name, time_s in log.phases:
        phases.setdefault(at, []).append((name, time_s))
    return phases


def _events(log: TrainingLog, steps: Sequence[LoggedStep]) -> Iterator[dict[str, Any]]:
    """Yield the events that training would have sent."""
    phases = _phases(log)
    for step in steps:
        yield {
            "event": "step",
            "step": step.iteration - 1,
            "time_s": step.time_s,
            "unix_s": step.unix_s,
            "window": step.window,
            "flags": list(step.flags),
        }
        for name, time_s in phases.get(step.iteration, ()):
            yield {"event": "phase", "name": name, "time_s": time_s}
    last = steps[-1]
    yield {"event": "window_closed", "window": last.window, "last_step": last.iteration - 1}
    if last.iteration >= log.num_steps:
        yield {"event": "end", "unix_s": last.unix_s}


def _write_records(run: LoggedRun, steps: Sequence[LoggedStep], directory: Path) -> None:
    """Write the file of rank 0, as hooks do."""
    first = run.log.lines[0]
    began_unix_s = steps[0].unix_s - first.num_iterations * first.time_s
    header = Header(
        schema=SCHEMA,
        run_id=run.run_id,
        rank=0,
        world_size=_number(run.log, "world_size") or 1,
        created_by="forerun import log",
        device=run.trained_on,
        started_unix_s=began_unix_s,
        is_of_all=True,
    )
    records: list[Record] = [
        header,
        _loop(run.log),
        *(_record(step, began_unix_s) for step in steps),
    ]
    for window in sorted({step.window for step in steps}):
        numbers = [step.iteration - 1 for step in steps if step.window == window]
        records.append(
            WindowRecord(
                window=window,
                first_step=numbers[0],
                last_step=numbers[-1],
                num_faults=0,
                num_dropped=0,
            )
        )
    path = directory / "records" / run.run_id / "rank-00000.jsonl"
    replace_file(path, "".join(json.dumps(to_dict(one)) + "\n" for one in records))


def _loop(log: TrainingLog) -> LoopRecord:
    batch, num_ranks = log.lines[-1].global_batch_size, _number(log, "world_size") or 1
    eval_iters = _number(log, "eval_iters") if "eval_iters" in log.arguments else 1
    return LoopRecord(
        num_steps=log.num_steps,
        samples=batch // num_ranks,
        tokens=batch * _number(log, "seq_length") // num_ranks,
        eval_interval=_number(log, "eval_interval") if eval_iters else 0,
        save_interval=_number(log, "save_interval"),
    )


def _record(step: LoggedStep, began_unix_s: float) -> StepRecord:
    time_ns = round(step.time_s * _NS_PER_S)
    return StepRecord(
        step=step.iteration - 1,
        window=step.window,
        start_ns=round((step.unix_s - began_unix_s) * _NS_PER_S) - time_ns,
        duration_ns=time_ns,
        gap_ns=0,
        is_hooked=False,
        flags=tuple(StepFlag(flag) for flag in step.flags),
    )
