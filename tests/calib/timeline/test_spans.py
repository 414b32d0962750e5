from __future__ import annotations

from itertools import pairwise

import pytest
from event_driven_pipeline import EventDriven, costs_of, pipelines
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.errors import ConfigError
from forerun.calib.timeline.programs import Pass, Pipeline, TaskKind
from forerun.calib.timeline.simulate import pipeline_costs, simulate, spans, timeline

REL = 1e-9
MESSAGES = (TaskKind.EXCHANGE, TaskKind.TRANSFER)


@settings(max_examples=100)
@given(pipeline=pipelines(), data=st.data())
def test_spans_agree_with_the_bulk_to_the_last_bit(pipeline: Pipeline, data: st.DataObject) -> None:
    costs = data.draw(costs_of(pipeline, num_columns=3))
    column = data.draw(st.integers(0, 2))
    found = simulate(costs, pipeline)
    one = timeline(costs, pipeline, column=column)
    assert one.makespan_s == found.makespan_s[column]
    assert spans(costs, pipeline, column=column) == one.spans
    for stage, use in enumerate(one.stages):
        ends = [s.end_s for s in one.spans if s.stage == stage and s.kind is not TaskKind.TRANSFER]
        assert max(ends) <= found.end_s[stage, column]
        assert use.busy_s == pytest.approx(found.compute_s[stage, column], rel=REL)
        held_s = found.transfer_s[stage, column]
        assert use.exposed_s >= held_s - REL * one.makespan_s
        if pipeline.num_virtual_stages == 1 and not pipeline.splits_backward:
            assert max(ends) == found.end_s[stage, column]
            assert use.exposed_s == pytest.approx(held_s, rel=REL, abs=REL)
            assert use.bubble_s == pytest.approx(found.idle_s[stage, column], rel=REL, abs=1e-7)


@settings(max_examples=100)
@given(pipeline=pipelines(), data=st.data())
def test_spans_are_those_of_a_plain_event_driven_run(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    costs = data.draw(costs_of(pipeline))
    plain = EventDriven(pipeline, costs)
    found = spans(costs, pipeline)
    passes = {
        (s.stage, Pass(s.kind, s.chunk, s.microbatch)): (s.start_s, s.end_s)
        for s in found
        if s.kind not in MESSAGES
    }
    assert passes == plain.passes
    shown = {(s.start_s, s.end_s) for s in found if s.kind in MESSAGES}
    assert shown == set(plain.arrived.values())


@settings(max_examples=60)
@given(pipeline=pipelines(), data=st.data())
def test_a_stage_computes_one_thing_at_a_time_and_its_step_adds_up(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    costs = data.draw(costs_of(pipeline))
    one = timeline(costs, pipeline)
    for stage, use in enumerate(one.stages):
        own = [s for s in one.spans if s.stage == stage and s.kind not in MESSAGES]
        assert all(after.start_s >= before.end_s for before, after in pairwise(own))
        total = use.busy_s + use.exposed_s + use.bubble_s
        assert total == pytest.approx(one.makespan_s, rel=REL)
        assert min(use.busy_s, use.exposed_s, use.bubble_s) >= -REL * one.makespan_s


@settings(max_examples=60)
@given(pipeline=pipelines(), data=st.data())
def test_the_critical_path_is_a_chain_of_spans_from_a_start_to_the_end(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    costs = data.draw(costs_of(pipeline))
    one = timeline(costs, pipeline)
    assert set(one.critical) <= set(one.spans)
    assert one.critical[0].start_s in costs.start_s[:, 0]
    assert one.critical[-1].end_s == one.makespan_s
    assert all(after.start_s == before.end_s for before, after in pairwise(one.critical))


@given(pipeline=pipelines(), data=st.data())
def test_slowing_what_is_critical_slows_the_step(pipeline: Pipeline, data: st.DataObject) -> None:
    costs = data.draw(costs_of(pipeline))
    one = timeline(costs, pipeline)
    chunk = next(s.chunk for s in one.critical if s.kind is TaskKind.FORWARD)
    costs.forward_s[chunk] += 0.5
    assert timeline(costs, pipeline).makespan_s >= one.makespan_s + 0.5 * (1 - REL)


def test_the_critical_path_of_a_slow_last_stage() -> None:
    """Down to the slow stage, all of its passes, and back up."""
    one = timeline(pipeline_costs([1.0, 1.0, 5.0], [1.0, 1.0, 5.0], activation_s=0.25), 4)
    names = [(s.kind.value, s.stage) for s in one.critical if s.kind not in MESSAGES]
    slow = [("forward", 2), ("backward", 2)] * 4
    ends = [("forward", 0), ("forward", 1)], [("backward", 1), ("backward", 0)]
    assert names == [*ends[0], *slow, *ends[1]]
    assert one.makespan_s == 2 + 40 + 2 + 0.25 * 5
    assert one.stages[2].busy_s == 40.0


def test_a_column_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="column 1: there are 1"):
        timeline(pipeline_costs([1.0], [1.0]), 2, column=1)
