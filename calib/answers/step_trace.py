"""A simulated or measured step as a Chrome/Perfetto trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..steps.estimate import StepEstimate
from ..timeline.measured import MeasuredSpan
from ..timeline.programs import TaskKind
from ..timeline.simulate import Span

_MICROSECONDS = 1_000_000
_PREDICTED, _MEASURED = 0, 1
_COLOURS = {
    TaskKind.FORWARD: "thread_state_running",
    TaskKind.BACKWARD: "thread_state_runnable",
    TaskKind.INPUT_GRADIENT: "thread_state_runnable",
    TaskKind.WEIGHT_GRADIENT: "thread_state_unknown",
    TaskKind.EXCHANGE: "thread_state_iowait",
    TaskKind.TRANSFER: "thread_state_iowait",
    TaskKind.REDUCE: "rail_load",
    TaskKind.GATHER: "rail_load",
    TaskKind.OPTIMIZER: "rail_animation",
}


def chrome_trace(estimate: StepEstimate, measured: Sequence[MeasuredSpan] = ()) -> dict[str, Any]:
    """A trace object with a predicted process and, where given, a measured one.

    Open it in ``ui.perfetto.dev`` or ``chrome://tracing``; times are in microseconds there.
    """
    stages = sorted({span.stage for span in estimate.spans})
    is_sent = any(span.kind is TaskKind.TRANSFER for span in estimate.spans)
    events = [_process(_PREDICTED, f"predicted ({estimate.time_s:.6g} s)")]
    events += [_thread(_PREDICTED, 2 * stage, f"stage {stage}") for stage in stages]
    if is_sent:
        events += [_thread(_PREDICTED, 2 * stage + 1, f"stage {stage} sends") for stage in stages]
    events += _predicted(estimate.spans)
    if measured:
        events += _measured(measured)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _predicted(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """One slice for each span; messages that run beside passes have a track of their own."""
    stages, kinds, chunks, microbatches, starts, ends = zip(*spans, strict=True)
    begin = np.array(starts) * _MICROSECONDS
    length = np.round(np.array(ends) * _MICROSECONDS - begin, 3).tolist()
    names = {kind: kind.value for kind in TaskKind}
    return [
        {
            "ph": "X",
            "pid": _PREDICTED,
            "tid": 2 * stage + (kind is TaskKind.TRANSFER),
            "name": f"{names[kind]} {microbatch}" if microbatch >= 0 else names[kind],
            "ts": at,
            "dur": duration,
            "cname": _COLOURS[kind],
            "args": {"microbatch": microbatch, "chunk": chunk},
        }
        for stage, kind, chunk, microbatch, at, duration in zip(
            stages, kinds, chunks, microbatches, np.round(begin, 3).tolist(), length, strict=True
        )
    ]


def _measured(spans: Sequence[MeasuredSpan]) -> list[dict[str, Any]]:
    events = [_process(_MEASURED, "measured")]
    tracks = sorted({(span.stage, span.rank) for span in spans})
    events += [_thread(_MEASURED, rank, f"stage {stage}, rank {rank}") for stage, rank in tracks]
    events += [
        {
            "ph": "X",
            "pid": _MEASURED,
            "tid": span.rank,
            "name": f"{span.kind.value} {span.microbatch}",
            "ts": round(span.start_s * _MICROSECONDS, 3),
            "dur": round((span.end_s - span.start_s) * _MICROSECONDS, 3),
            "cname": _COLOURS[span.kind],
        }
        for span in sorted(spans, key=lambda span: span.start_s)
    ]
    return events


def _process(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}


def _thread(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
