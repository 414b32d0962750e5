from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from planted_steps import estimate_step

from forerun.calib.answers.step_trace import chrome_trace
from forerun.calib.timeline.measured import MeasuredSpan
from forerun.calib.timeline.programs import TaskKind
from forerun.calib.workload.config import RunConfig


def test_a_trace_holds_every_span_in_microseconds(
    layout: Callable[..., RunConfig], planted: Callable[..., Any]
) -> None:
    estimate = estimate_step(layout(pp=2), planted())
    trace = json.loads(json.dumps(chrome_trace(estimate)))
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == len(estimate.spans)
    ends = max(e["ts"] + e["dur"] for e in slices)
    assert ends == pytest.approx(max(s.end_s for s in estimate.spans) * 1e6, abs=0.01)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {"stage 0", "stage 1"}


def test_measured_spans_get_a_process_of_their_own(
    layout: Callable[..., RunConfig], planted: Callable[..., Any]
) -> None:
    estimate = estimate_step(layout(), planted())
    measured = [
        MeasuredSpan(
            rank=rank, stage=0, kind=TaskKind.FORWARD, microbatch=0, start_s=at_s, end_s=at_s + 0.25
        )
        for rank, at_s in ((1, 0.5), (0, 0.0))
    ]
    events = chrome_trace(estimate, measured)["traceEvents"]
    own = [e for e in events if e["pid"] == 1 and e["ph"] == "X"]
    assert [(e["tid"], e["ts"], e["dur"]) for e in own] == [(0, 0.0, 250e3), (1, 500e3, 250e3)]
