from __future__ import annotations

from itertools import pairwise

import pytest
from event_driven_pipeline import EventDriven, column_of, costs_of, pipelines
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.timeline.graph import pipeline_costs
from forerun.calib.timeline.programs import Pass, Pipeline, TaskKind
from forerun.calib.timeline.simulation import simulate, spans

REL = 1e-9
MESSAGES = (TaskKind.EXCHANGE, TaskKind.TRANSFER)


@settings(max_examples=100)
@given(pipeline=pipelines(), data=st.data())
def test_spans_agree_with_the_bulk_to_the_last_bit(pipeline: Pipeline, data: st.DataObject) -> None:
    costs = data.draw(costs_of(pipeline, num_columns=3))
    column = data.draw(st.integers(0, 2))
    simulation = simulate(costs, pipeline)
    one = spans(column_of(costs, column), pipeline)
    assert max(s.end_s for s in one) == simulation.makespan_s[column]
    for stage in range(pipeline.num_stages):
        stage_spans = [s for s in one if s.stage == stage and s.kind is not TaskKind.TRANSFER]
        last = max(s.end_s for s in stage_spans)
        assert last <= simulation.end_s[stage, column]
        busy_s = sum(s.end_s - s.start_s for s in stage_spans if s.kind not in MESSAGES)
        assert busy_s == pytest.approx(simulation.compute_s[stage, column], rel=REL)
        if pipeline.num_virtual_stages == 1:
            assert last == simulation.end_s[stage, column]
            transfer_s = sum(s.end_s - s.start_s for s in stage_spans if s.kind in MESSAGES)
            assert transfer_s == pytest.approx(
                simulation.transfer_s[stage, column], rel=REL, abs=REL
            )


@settings(max_examples=100)
@given(pipeline=pipelines(), data=st.data())
def test_spans_are_those_of_a_plain_event_driven_run(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    costs = data.draw(costs_of(pipeline))
    plain = EventDriven(pipeline, costs)
    result = spans(costs, pipeline)
    passes = {
        (s.stage, Pass(s.kind, s.chunk, s.microbatch)): (s.start_s, s.end_s)
        for s in result
        if s.kind not in MESSAGES
    }
    assert passes == plain.passes
    shown = {(s.start_s, s.end_s) for s in result if s.kind in MESSAGES}
    assert shown == set(plain.arrived.values())


@settings(max_examples=60)
@given(pipeline=pipelines(), data=st.data())
def test_a_stage_computes_one_thing_at_a_time(pipeline: Pipeline, data: st.DataObject) -> None:
    result = spans(data.draw(costs_of(pipeline)), pipeline)
    for stage in range(pipeline.num_stages):
        compute_spans = [s for s in result if s.stage == stage and s.kind not in MESSAGES]
        assert all(after.start_s >= before.end_s for before, after in pairwise(compute_spans))


def test_a_slow_last_stage_never_waits() -> None:
    """Down to it, all of its passes with the exchanges between them, and back up."""
    costs = pipeline_costs([1.0, 1.0, 5.0], [1.0, 1.0, 5.0], activation_s=0.25)
    result = spans(costs, Pipeline(num_stages=3, num_microbatches=4))
    assert max(s.end_s for s in result) == 2 + 40 + 2 + 0.25 * 5
