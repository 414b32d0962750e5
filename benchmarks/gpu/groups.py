"""A step of 40,000 collectives in a group of one rank: exhausted events, and the dump."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forerun.benchmarks.gpu.bench import Bench
from forerun.calib.records import CollectiveRecord, OperatorRecord, StepRecord, WindowRecord
from forerun.calib.samples import read_run
from forerun.calib.workload import TraceChoice
from forerun.hooks.process import Settings, current_rank
from forerun.hooks.recording import NUM_CALLS
from forerun.hooks.session import AttachedRun, Session

_CALLS, _CPU_CALLS = 40_000, 400
_WINDOW, _BEFORE, _AFTER = 20, 3, 12
_ENTRIES = {"default": 2_000, "ours": NUM_CALLS}


def groups(bench: Bench) -> None:
    """Measure zero durations, steps to the first answer, and duration and pauses of a dump."""
    os.environ |= {"TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_FR_BUFFER_SIZE": str(NUM_CALLS)}
    bench.begin_device()
    # The device in virtual time has gloo's transfers, and calls of gloo are not in its dump.
    backend = "gloo" if bench.is_cpu else "nccl"
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    value = torch.ones(1024, device="cuda")
    _measure_dumps(bench, value)
    calls = _CPU_CALLS if bench.is_cpu else _CALLS
    bench.put(num_calls=calls)
    _train(bench, value, calls)
    dist.destroy_process_group()


def _measure_dumps(bench: Bench, value: torch.Tensor) -> None:
    from forerun.hooks.recording import find_dumps

    dump = next(iter(find_dumps().values()), None)
    if dump is None:
        bench.put(dump="none can be made here")
        return
    done = 0
    for name, entries in {"ours": 200}.items() if bench.is_cpu else _ENTRIES.items():
        for _ in range(entries - done):
            dist.all_reduce(value)
        done = entries
        torch.cuda.synchronize()
        alone_s, nbytes = _timed(dump)
        pause_s = _longest_pause_s(dump)
        bench.put(
            **{
                f"dump_{name}_s": alone_s,
                f"dump_{name}_nbytes": nbytes,
                f"dump_{name}_stops_python_s": pause_s,
            }
        )


def _timed(dump: Callable[[], str | bytes]) -> tuple[float, int]:
    begin_s = time.perf_counter()
    text = dump()
    return time.perf_counter() - begin_s, len(text)


def _longest_pause_s(dump: Callable[[], object]) -> float:
    """Return the longest time that this thread is blocked while another dumps."""
    thread = threading.Thread(target=dump)
    last_s = time.perf_counter()
    longest_s = 0.0
    thread.start()
    while thread.is_alive():
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return max(longest_s, time.perf_counter() - last_s)


def _train(bench: Bench, value: torch.Tensor, calls: int) -> None:
    model = torch.nn.Linear(256, 256).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ones = torch.ones(64, 256, device="cuda")

    def step() -> float:
        begin_s = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(value)
        loss = model(ones).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        return time.perf_counter() - begin_s

    step()
    bench.put(plain_step_s=statistics.median(step() for _ in range(3)))
    folder = bench.work / "run"
    times_s, answered = [], None
    # A traced step would delay the answer; ``trace`` measures one.
    settings = Settings(rank=current_rank(), steps=_WINDOW, directory=folder, trace=TraceChoice.OFF)
    with AttachedRun(Session(settings), (model,), optimizer, None) as run:
        for number in range(_BEFORE + _WINDOW + _AFTER):
            if bench.remaining_s < 10.0:
                break
            times_s.append(step())
            run.step()
            if number >= _BEFORE + _WINDOW - 1 and answered is None and _has_window(folder):
                answered = number - (_BEFORE + _WINDOW - 1)
                bench.put(steps_to_answer=answered)
    bench.put(num_steps=len(times_s), steps_s=times_s)
    _judge_records(bench, folder)


def _has_window(folder: Path) -> bool:
    """Return True if the writer has put the window's end into this rank's file."""
    return any('"type":"window"' in text.replace(" ", "") for text in _texts(folder))


def _texts(folder: Path) -> list[str]:
    texts = []
    for path in folder.rglob("*.jsonl"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65_536))
            texts.append(file.read().decode("utf-8", errors="replace"))
    return texts


def _judge_records(bench: Bench, folder: Path) -> None:
    records: list[Any] = [
        r for rank_records in read_run(folder).records.values() for r in rank_records
    ]
    timed = [r for r in records if isinstance(r, CollectiveRecord | OperatorRecord)]
    windows = [r for r in records if isinstance(r, WindowRecord)]
    hooked = {r.step for r in records if isinstance(r, StepRecord) and r.is_hooked}
    bench.put(
        num_records=len(timed),
        num_zero_durations=sum(r.duration_ns == 0 for r in timed),
        num_hooked_steps=len(hooked),
        num_steps_with_records=len({r.step for r in timed} & hooked),
        num_dropped=sum(r.num_dropped for r in windows),
        num_faults=sum(r.num_faults for r in windows),
        hook_s=statistics.median(
            [r.hook_ns / 1e9 for r in records if isinstance(r, StepRecord) and r.is_hooked] or [0.0]
        ),
    )
