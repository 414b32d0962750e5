"""Recorders, bytes sent and time to collect a window, for 16,384 simulated ranks.

    python benchmarks/costs/scale.py

Windows of single ranks are marked by the real recorder.  Messages go through a real store, whose
server and senders are separate processes, to the exchange that collects in a real run.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import torch.distributed as dist
from simulated_steps import SimulatedRank, steps

from forerun.benchmarks.markdown_text import markdown_table
from forerun.calib.records import WindowRecord
from forerun.calib.workload import (
    FILES_NBYTES,
    SUMMARIES_NBYTES,
    Parallelism,
    RecordingDetail,
    RecordingPlan,
    recording_plan,
)
from forerun.hooks.process import RankInfo, StoreLink
from forerun.hooks.recording import BoundedWindow, Exchange, WindowRecords, line_of

NUM_RANKS = 16_384
NUM_SENDERS = 4
HOOKED_STEPS = range(3, 23, 2)
LAYOUTS = {
    "TP8 PP16 DP128": Parallelism(tp=8, pp=16, dp=128),
    "TP8 CP2 PP16 DP64": Parallelism(tp=8, cp=2, pp=16, dp=64),
    "TP8 PP16 DP128 EP64": Parallelism(tp=8, pp=16, dp=128, ep=64, etp=1),
    "PP16 DP1024 EP256": Parallelism(pp=16, dp=1024, ep=256),
    "DP16384": Parallelism(dp=NUM_RANKS),
}


def window_of(plan: RecordingPlan, layout: Parallelism, rank: int, **size: int) -> Any:
    """Return a closed window of ten hooked steps of one rank, and its CPU time in seconds."""
    has_operators = plan.part(rank) is RecordingDetail.OPERATORS
    simulated = SimulatedRank(layout, rank, has_operators=has_operators, **size)
    window, bounded = WindowRecords(), BoundedWindow(plan, rank)
    for record, log in steps(simulated, HOOKED_STEPS):
        window.note(record)
        bounded.takes(record, line_of(record))
        window.logs.append(log)
    end = WindowRecord(window=0, first_step=3, last_step=22, num_faults=0, num_dropped=0)
    begin_s = time.thread_time()
    closed = bounded.close(window, end, (), header=line_of(simulated.header()))
    return closed, time.thread_time() - begin_s


def plan_rows() -> Iterator[list[str]]:
    """Yield the recorders and byte bounds of each layout."""
    for name, layout in LAYOUTS.items():
        begin_s = time.perf_counter()
        plan = recording_plan(NUM_RANKS, layout)
        spent_s = time.perf_counter() - begin_s
        bounds = [plan.file_nbytes(rank) or 0 for rank in plan.recorders]
        files = sum(bounds) + SUMMARIES_NBYTES
        yield [
            name,
            str(len(plan.replica)),
            str(len(plan.recorders)),
            f"{max(bounds) >> 10} / {min(bounds) >> 10}",
            f"{files / (1 << 20):.1f}",
            f"{1e3 * spent_s:.1f}",
        ]


def window_rows(layout: Parallelism) -> Iterator[list[str]]:
    """Yield bytes of one window, by the part that a rank records."""
    plan = recording_plan(NUM_RANKS, layout)
    by_part = {part: rank for rank, part in plan.parts.items()} | {RecordingDetail.WATCH: 0}
    for part, rank in by_part.items():
        for num_microbatches in (16, 64, 256):
            closed, cpu_s = window_of(plan, layout, rank, num_microbatches=num_microbatches)
            yield [
                part.value,
                str(num_microbatches),
                str(len(closed.message)),
                str(sum(map(len, closed.lines))),
                f"{cpu_s:.2f}",
            ]


def send_all(port: int, first: int, messages: dict[str, bytes], plan: RecordingPlan) -> None:
    """Send the messages of every fourth rank, one after the other."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    link = StoreLink(store, "simulated").connect()
    for rank in range(first, NUM_RANKS - 1, NUM_SENDERS):
        # Give each summary different digits, as in real runs.
        noise = str(hash((rank, "step")) % 10**9).encode()
        message = messages[plan.part(rank).value].replace(b'"rank": 0', b'"rank": %d' % rank)
        link.set(str(rank), message.replace(b'"step_ns": ', b'"step_ns": ' + noise))


def collect(layout: Parallelism) -> dict[str, str]:
    """Send and collect one window of all ranks over a store; return the costs."""
    plan = recording_plan(NUM_RANKS, layout)
    by_part = {part: rank for rank, part in plan.parts.items()} | {RecordingDetail.WATCH: 0}
    messages = {
        part.value: b"0\n" + window_of(plan, layout, rank)[0].message.encode()
        for part, rank in by_part.items()
    }
    spawn = multiprocessing.get_context("spawn")
    ready, done = spawn.Queue(), spawn.Event()
    server = spawn.Process(target=_serve, args=(ready, done))
    server.start()
    port = ready.get()
    begin_s = time.perf_counter()
    senders = [
        spawn.Process(target=send_all, args=(port, first, messages, plan))
        for first in range(NUM_SENDERS)
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    sent_s = time.perf_counter() - begin_s
    with tempfile.TemporaryDirectory() as folder:
        spent = _collected(Path(folder), plan, port)
    done.set()
    server.join()
    return {"all sent after s": f"{sent_s:.1f}", **spent}


def _serve(ready: Any, done: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ready.put(store.port)
    done.wait()


def _collected(folder: Path, plan: RecordingPlan, port: int) -> dict[str, str]:
    last = NUM_RANKS - 1
    info = RankInfo(
        rank=last, world_size=NUM_RANKS, local_rank=7, local_world_size=8, run_id="simulated"
    )
    exchange = Exchange(info, folder)
    exchange.begin(plan)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    exchange._link = StoreLink(store, "simulated")
    complete: list[float] = []
    begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
    exchange.hand_over(0, "", on_complete=lambda: complete.append(time.perf_counter()))
    exchange.finish(patience_s=120.0)
    files = sorted(folder.iterdir())
    return {
        "collected after s": f"{complete[0] - begin_s:.1f}",
        "CPU s of the collecting thread": f"{time.thread_time() - begin_cpu_s:.2f}",
        "bytes received": str(exchange.num_received_nbytes),
        "files": str(len(files)),
        "bytes in files": str(sum(path.stat().st_size for path in files)),
        "bytes of the summaries": str((folder / "summaries.jsonl").stat().st_size),
        "keys left in the store": str(store.num_keys()),
    }


def main() -> None:
    """Print three tables."""
    total = (FILES_NBYTES + SUMMARIES_NBYTES) >> 20
    head = ["layout", "replica", "recorders", "KiB per file (most / least)", "MiB in all", "ms"]
    print(f"Who records, of {NUM_RANKS} ranks (files <= {total} MiB)\n")
    print(markdown_table(head, list(plan_rows())))
    layout = LAYOUTS["TP8 PP16 DP128"]
    head = ["part", "micro-batches", "message bytes", "bytes in its file", "CPU s"]
    print("\nA window of ten hooked steps, five layers per stage, TP8 PP16 DP128\n")
    print(markdown_table(head, list(window_rows(layout))))
    print("\nOne window of all ranks over a TCP store\n")
    for name in ("TP8 PP16 DP128", "TP8 PP16 DP128 EP64"):
        print(markdown_table(["", name], [list(row) for row in collect(LAYOUTS[name]).items()]))
        print()


if __name__ == "__main__":
    main()
