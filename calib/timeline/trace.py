"""A simulated or measured step as a Chrome/Perfetto trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .schedules import TaskKind
from .step import StepEstimate

_MICROSECONDS = 1_000_000
_PREDICTED, _MEASURED = 0, 1
_COLOURS = {
    TaskKind.FORWARD: "thread_state_running",
    TaskKind.BACKWARD: "thread_state_runnable",
    TaskKind.EXCHANGE: "thread_state_iowait",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpan:
    """Something that was measured, in seconds from the start of its step."""

    track: str
    name: str
    start_s: float
    end_s: float


def chrome_trace(estimate: StepEstimate, measured: Sequence[MeasuredSpan] = ()) -> dict[str, Any]:
    """A trace object with a predicted process and, where given, a measured one.

    Open it in ``ui.perfetto.dev`` or ``chrome://tracing``; times are in microseconds there.
    """
    events = [_process(_PREDICTED, f"predicted ({estimate.time_s:.6g} s)")]
    events += [
        _thread(_PREDICTED, stage, f"stage {stage}")
        for stage in sorted({span.stage for span in estimate.spans})
    ]
    for span in estimate.spans:
        name = f"{span.kind.value} {span.microbatch}"
        event = _slice(_PREDICTED, span.stage, name, span.start_s, span.end_s)
        event["cname"] = _COLOURS[span.kind]
        event["args"] = {"microbatch": span.microbatch}
        events.append(event)
    if measured:
        events += _measured(measured)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _measured(spans: Sequence[MeasuredSpan]) -> list[dict[str, Any]]:
    tracks = {name: index for index, name in enumerate(sorted({s.track for s in spans}))}
    events = [_process(_MEASURED, "measured")]
    events += [_thread(_MEASURED, index, name) for name, index in tracks.items()]
    events += [
        _slice(_MEASURED, tracks[s.track], s.name, s.start_s, s.end_s)
        for s in sorted(spans, key=lambda s: s.start_s)
    ]
    return events


def _process(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}


def _thread(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _slice(pid: int, tid: int, name: str, start_s: float, end_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "ts": round(start_s * _MICROSECONDS, 3),
        "dur": round((end_s - start_s) * _MICROSECONDS, 3),
    }
