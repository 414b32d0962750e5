from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from event_driven_pipeline import links, passes, peak_in_flight, pipelines
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.errors import ConfigError
from forerun.calib.timeline.programs import Pass, Pipeline, TaskKind
from forerun.calib.timeline.schedules import (
    num_interleaved_warmup,
    num_warmup,
    stage_program,
)

LETTERS = {TaskKind.FORWARD: "f", TaskKind.BACKWARD: "b"}


def letters(pipeline: Pipeline, stage: int) -> str:
    return "".join(LETTERS[task.kind] for task in passes(stage_program(pipeline, stage)))


def test_the_last_stage_alternates() -> None:
    result = passes(stage_program(Pipeline(num_stages=4, num_microbatches=3), 3))
    assert result == [
        Pass(kind, 3, index) for index in range(3) for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
    ]


def test_the_first_stage_warms_up_and_cools_down() -> None:
    assert letters(Pipeline(num_stages=4, num_microbatches=6), 0) == "fff" + "fb" * 3 + "bbb"


def test_interleaved_chunks_take_turns_as_in_the_paper() -> None:
    """Narayanan et al. (SC 2021), figure 4: 4 devices, 2 chunks, 8 micro-batches, last device."""
    pipeline = Pipeline(num_stages=4, num_microbatches=8, num_virtual_stages=2)
    result = passes(stage_program(pipeline, 3))
    forward = [(t.chunk // 4, t.microbatch) for t in result if t.kind is TaskKind.FORWARD]
    first, second = range(4), range(4, 8)
    assert forward == [(chunk, i) for group in (first, second) for chunk in (0, 1) for i in group]
    backward = [(t.chunk // 4, t.microbatch) for t in result if t.kind is TaskKind.BACKWARD]
    assert backward == [(chunk, i) for group in (first, second) for chunk in (1, 0) for i in group]
    assert letters(pipeline, 3) == "ffff" + "fb" * 12 + "bbbb"


@given(pipeline=pipelines(), data=st.data())
def test_every_pass_runs_once(pipeline: Pipeline, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, pipeline.num_stages - 1))
    counts = Counter(passes(stage_program(pipeline, stage)))
    assert counts == Counter(
        Pass(kind, chunk, index)
        for kind in LETTERS
        for chunk in range(stage, pipeline.num_chunks, pipeline.num_stages)
        for index in range(pipeline.num_microbatches)
    )


@given(pipeline=pipelines())
def test_both_ends_of_a_link_post_the_same_in_the_same_order(pipeline: Pipeline) -> None:
    """Point-to-point messages carry no name: the k-th send meets the k-th receive."""
    total = 0
    for sent, received in links(pipeline):
        assert sent == received
        total += len(sent)
    assert total == 2 * (pipeline.num_chunks - 1) * pipeline.num_microbatches


@given(pipeline=pipelines(), data=st.data())
def test_activations_in_flight(pipeline: Pipeline, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, pipeline.num_stages - 1))
    p, m = pipeline.num_stages, pipeline.num_microbatches
    peak = peak_in_flight(pipeline, stage)
    if pipeline.num_virtual_stages > 1:
        warmup = num_interleaved_warmup(pipeline, stage)
        assert peak == min(warmup + 1, m * pipeline.num_virtual_stages)
    else:
        assert peak == min(m, p - stage) == min(m, num_warmup(p, m, stage) + 1)


@given(pipeline=pipelines(), data=st.data())
def test_a_backward_pass_follows_its_forward_pass(pipeline: Pipeline, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, pipeline.num_stages - 1))
    order = {task: place for place, task in enumerate(passes(stage_program(pipeline, stage)))}
    for task, place in order.items():
        if task.kind is TaskKind.BACKWARD:
            assert order[task._replace(kind=TaskKind.FORWARD)] < place


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_stages": 0}, "num_stages is 0, not at least 1"),
        ({"num_microbatches": 3}, "microbatch_group_size is 4, not from pp 4 to 3 micro-batches"),
        ({"microbatch_group_size": 3}, "microbatch_group_size is 3, not from pp 4"),
        ({"num_microbatches": 10}, "10 micro-batches in groups of 4 leave 2, fewer than pp 4"),
        ({"num_stages": 1}, "vp 2 on 1 stages"),
        ({"num_stages": 2, "overlaps_p2p": False}, "vp 2 on 2 stages"),
    ],
)
def test_what_megatron_refuses_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    fitting = {"num_stages": 4, "num_microbatches": 8, "num_virtual_stages": 2}
    with pytest.raises(ConfigError, match=message):
        Pipeline(**{**fitting, **settings})
