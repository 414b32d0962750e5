"""What a window of marks costs: to write in training, to read afterwards, and in bytes.

``python -m forerun.benchmarks.costs.windows``: a rank of TP2 PP2 whose ten hooked steps have about
3,500 records, and recording ranks of 1,024 and 16,384.  Simulated steps with the real recorder;
processor time, the least of five.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from simulated_steps import SimulatedRank, steps

from forerun.calib.marks.marked_window import MarkedWindow
from forerun.calib.marks.window_records import WindowRecords, records_of
from forerun.calib.records.record_kinds import WindowRecord, to_dict
from forerun.calib.workload.parallelism import Parallelism
from forerun.calib.workload.recording import RecordingDetail, recording_plan
from forerun.hooks.recording._bounded_window import BoundedWindow

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
