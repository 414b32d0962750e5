"""What a window of marks costs: to write in training, to read afterwards, and in bytes.

``python -m forerun.benchmarks.costs.windows``: a rank of TP2 PP2 whose ten hooked steps have about
3,500 records, and recording ranks of 1,024 and 16,384.  Simulated steps with the real recorder;
processor time, the least of five.  Last, what the trace of a step costs.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import torch
from simulated_steps import SimulatedRank, steps

from forerun.calib.marks._traced_records import slim
from forerun.calib.marks.marked_window import MarkedWindow
from forerun.calib.marks.window_records import WindowRecords, records_of
from forerun.calib.records.chrome_trace import events_in, from_chrome
from forerun.calib.records.kineto_trace import TracedWork, work_of
from forerun.calib.records.record_kinds import WindowRecord, to_dict
from forerun.calib.workload.parallelism import Parallelism
from forerun.calib.workload.recording import RecordingDetail, recording_plan
from forerun.hooks.recording._bounded_window import BoundedWindow
from forerun.hooks.recording.writer import compress_trace

_HOOKED = range(3, 23, 2)
_END = WindowRecord(window=0, first_step=3, last_step=22, num_faults=0, num_dropped=0)
_LARGE = (Parallelism(tp=8, pp=8, dp=16), Parallelism(tp=8, pp=16, dp=128))


def recorded(rank: SimulatedRank) -> MarkedWindow:
    """Return the window of a rank as its writer has it when the window closes."""
    window = MarkedWindow(end=_END)
    for record, log in steps(rank, _HOOKED):
        log.resolve()
        window.note(record)
        window.steps.append(log)
    return window


def fault(error: object) -> None:
    """Refuse what no step of this benchmark should have."""
    raise RuntimeError(error)


def least_s(call: Callable[[], object]) -> float:
    """Return the least processor time of five calls, in seconds."""
    times = []
    for _ in range(5):
        begin_s = time.process_time()
        call()
        times.append(time.process_time() - begin_s)
    return min(times)


def main() -> None:
    """Print the costs of one rank, then the bytes of large worlds."""
    window = recorded(SimulatedRank(Parallelism(tp=2, pp=2), 0, num_layers=4, num_microbatches=8))
    line = window.to_line(fault)

    def made() -> list[str]:
        known = WindowRecords(logs=[*window.steps], step_ns=dict(window.step_ns))
        return [json.dumps(to_dict(record)) for log in window.steps for record in known.of(log)]

    def read() -> int:
        return len([*records_of(MarkedWindow.from_json(json.loads(line), fault), fault)])

    write_s, made_s, read_s = least_s(lambda: window.to_line(fault)), least_s(made), least_s(read)
    nbytes = sum(map(len, made()))
    print(f"{read()} records: written as marks in {1e3 * write_s:.1f} ms, {len(line)} bytes")
    print(f"as records in {1e3 * made_s:.1f} ms ({made_s / write_s:.0f} times), {nbytes} bytes")
    print(f"read in {1e3 * read_s:.1f} ms")
    for layout in _LARGE:
        large(layout)
    traced()


def traced() -> None:
    """Print what a trace of a CPU's passes costs to export, to compress and to read."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(800)))
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    )
    with profiler:
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
    with tempfile.TemporaryDirectory() as home:
        plain, packed = Path(home) / "trace.json", Path(home) / "trace.json.gz"
        begin_s = time.process_time()
        profiler.export_chrome_trace(str(plain))  # once: a second call raises
        export_s = time.process_time() - begin_s

        def compress() -> None:
            with plain.open("rb") as trace, packed.open("wb") as file:
                compress_trace(trace, file)

        def read() -> list[TracedWork]:
            with gzip.open(packed, "rt") as file:
                return work_of(
                    from_chrome(map(slim, events_in(iter(partial(file.read, 1 << 20), ""))))
                )

        compress_s, read_s = least_s(compress), least_s(read)
        num_events = len(from_chrome(json.loads(plain.read_text())["traceEvents"]))
        print(
            f"trace of {num_events} events, {plain.stat().st_size} bytes: exported in "
            f"{export_s:.3f} s, compressed in {compress_s:.3f} s to {packed.stat().st_size} bytes, "
            f"read in {read_s:.2f} s"
        )


def large(layout: Parallelism) -> None:
    """Print what a first window takes in a large world, by the part that a rank records."""
    world_size = layout.num_ranks
    plan = recording_plan(world_size, layout)
    limits = [plan.file_nbytes(rank) or 0 for rank in plan.recorders]
    print(
        f"{world_size} ranks: {len(limits)} files of at most {sum(limits) / 2**20:.0f} MiB in all"
    )
    for part in RecordingDetail:
        rank = next((rank for rank in range(world_size) if plan.part(rank) is part), None)
        if rank is None:
            continue
        has_operators = part is RecordingDetail.OPERATORS
        bounded = BoundedWindow(plan, rank, on_fault=fault)
        closed = bounded.close(recorded(SimulatedRank(layout, rank, has_operators=has_operators)))
        size = sum(map(len, closed.lines))
        print(f"  {part.value}: {size} bytes in its file, {len(closed.message)} sent")


if __name__ == "__main__":
    main()
