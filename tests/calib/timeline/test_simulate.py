from __future__ import annotations

import numpy as np
import pytest
from event_driven_pipeline import EventDriven, column_of, costs_of, pipelines
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.errors import ConfigError
from forerun.calib.timeline import simulation
from forerun.calib.timeline.graph import PipelineCosts, concat_costs, pipeline_costs
from forerun.calib.timeline.programs import Pipeline
from forerun.calib.timeline.simulation import Floats, Simulation, simulate

REL = 1e-9
"""Sums of a few thousand floats in different orders."""
TIMES = st.integers(1, 9)


def idle_s(timings: Simulation) -> Floats:
    """Return the bubble of each stage: makespan less compute and transfers."""
    return timings.makespan_s - timings.compute_s - timings.transfer_s


@given(p=st.integers(1, 10), m=st.integers(1, 40), f=TIMES, b=TIMES)
def test_equal_stages_follow_the_closed_form(p: int, m: int, f: int, b: int) -> None:
    """1F1B idles (p - 1)(f + b)."""
    costs = pipeline_costs([float(f)] * p, [float(b)] * p)
    assert simulate(costs, m).makespan_s.tolist() == [(m + p - 1) * (f + b)]


@given(
    p=st.integers(3, 6),
    v=st.integers(2, 4),
    groups=st.integers(1, 5),
    f=TIMES,
    b=TIMES,
    overlaps=st.booleans(),
)
def test_interleaving_divides_the_bubble(
    p: int, v: int, groups: int, f: int, b: int, overlaps: bool
) -> None:
    """Narayanan et al. (SC 2021), section 2.2: (p - 1)(f + b) / v; f and b of a whole stage."""
    m = groups * p
    costs = pipeline_costs([float(f)] * p * v, [float(b)] * p * v, num_virtual_stages=v)
    pipeline = Pipeline(
        num_stages=p, num_microbatches=m, num_virtual_stages=v, overlaps_p2p=overlaps
    )
    assert simulate(costs, pipeline).makespan_s.tolist() == [(m * v + p - 1) * (f + b)]


def test_two_stages_with_transfers_match_a_hand_count() -> None:
    """f 2, b 3, transfer 1 over two stages and two micro-batches, written out task by task.

    Stage 0: f0 0-2, x 2-3, f1 3-5; stage 1: f0 3-5, b0 5-8; both: g0 and a1 8-9; stage 0: b0 9-12;
    stage 1: f1 9-11, b1 11-14; both: g1 14-15; stage 0: b1 15-18.
    """
    costs = pipeline_costs([2.0, 2.0], [3.0, 3.0], activation_s=1.0, gradient_s=1.0)
    simulation = simulate(costs, 2)
    assert simulation.end_s[:, 0].tolist() == [18.0, 15.0]
    assert simulation.transfer_s[:, 0].tolist() == [3.0, 3.0]
    assert simulation.compute_s[:, 0].tolist() == [10.0, 10.0]
    assert idle_s(simulation)[:, 0].tolist() == [5.0, 5.0]


def test_a_slow_stage_sets_the_pace() -> None:
    """One slow stage, free transfers: fill, m slow passes, drain."""
    m, slow = 50, 7.0
    costs = pipeline_costs([1.0, slow, 1.0], [1.0, slow, 1.0])
    assert simulate(costs, m).makespan_s[0] == 1 + m * 2 * slow + 1


def test_messages_that_overlap_hide_in_the_steady_phase() -> None:
    """Blocking, each of the m v rounds pays for messages; overlapping, warm-up and cool-down do."""
    p, v, m, hop = 4, 2, 64, 0.1
    costs = pipeline_costs(
        [1.0] * p * v, [1.0] * p * v, activation_s=hop, gradient_s=hop, num_virtual_stages=v
    )

    def makespan(**settings: bool) -> float:
        pipeline = Pipeline(num_stages=p, num_microbatches=m, num_virtual_stages=v, **settings)
        return float(simulate(costs, pipeline).makespan_s[0])

    free = 2.0 * (m * v + p - 1)
    ends, steady, blocking = (
        makespan(overlaps_p2p_ends=True),
        makespan(),
        makespan(overlaps_p2p=False),
    )
    assert free < ends <= steady < blocking
    assert steady - free < 0.25 * (blocking - free)
    assert blocking - free > hop * m * v


@settings(max_examples=200)
@given(pipeline=pipelines(), data=st.data())
def test_the_simulation_is_that_of_a_plain_event_driven_run(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    costs = data.draw(costs_of(pipeline))
    assert simulate(costs, pipeline).end_s[:, 0].tolist() == EventDriven(pipeline, costs).end_s


@settings(max_examples=100)
@given(pipeline=pipelines(), data=st.data())
def test_makespan_is_bounded_by_chain_by_busiest_stage_and_by_the_sum(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    costs = data.draw(costs_of(pipeline))
    simulation = simulate(costs, pipeline)
    makespan, m = simulation.makespan_s[0], pipeline.num_microbatches
    down = costs.forward_s.sum() + costs.activation_s.sum()
    up = costs.backward_s.sum() + costs.gradient_s.sum()
    assert makespan >= (down + up) * (1 - REL)
    assert np.all(idle_s(simulation) >= -REL * makespan)
    assert np.all(simulation.end_s >= costs.start_s)
    every = simulation.compute_s.sum() + m * (
        costs.activation_s.sum() + costs.gradient_s.sum() + costs.both_s.sum()
    )
    assert makespan <= costs.start_s.max() + every * (1 + REL)


@settings(max_examples=60)
@given(pipeline=pipelines(), data=st.data())
def test_work_is_conserved(pipeline: Pipeline, data: st.DataObject) -> None:
    costs = data.draw(costs_of(pipeline))
    values = simulate(costs, pipeline).compute_s[:, 0]
    passes = costs.forward_s + costs.backward_s
    for stage in range(pipeline.num_stages):
        expected = pipeline.num_microbatches * passes[stage :: pipeline.num_stages, 0].sum()
        assert values[stage] == pytest.approx(expected, rel=REL)


@settings(max_examples=60)
@given(pipeline=pipelines(), data=st.data(), factor=st.floats(0.1, 10.0))
def test_scaling_all_times_scales_the_makespan(
    pipeline: Pipeline, data: st.DataObject, factor: float
) -> None:
    costs = data.draw(costs_of(pipeline))
    scaled = PipelineCosts(
        **{name: factor * getattr(costs, name) for name in PipelineCosts.__dataclass_fields__}
    )
    base = simulate(costs, pipeline).end_s
    assert simulate(scaled, pipeline).end_s == pytest.approx(factor * base, rel=REL)


@settings(max_examples=100)
@given(pipeline=pipelines(), data=st.data())
def test_a_slower_part_never_makes_any_stage_end_earlier(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    costs = data.draw(costs_of(pipeline))
    names = [n for n in PipelineCosts.__dataclass_fields__ if getattr(costs, n).size]
    name = data.draw(st.sampled_from(names))
    rows = {n: getattr(costs, n).copy() for n in PipelineCosts.__dataclass_fields__}
    row = data.draw(st.integers(0, rows[name].shape[0] - 1))
    rows[name][row] += data.draw(st.floats(0.0, 5.0))
    slower = simulate(PipelineCosts(**rows), pipeline).end_s
    assert np.all(slower >= simulate(costs, pipeline).end_s * (1 - REL))


@settings(max_examples=40)
@given(pipeline=pipelines(), data=st.data())
def test_alternatives_side_by_side_do_not_touch_each_other(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    costs = data.draw(costs_of(pipeline, num_columns=3))
    alone = [column_of(costs, index) for index in range(3)]
    for together in (simulate(costs, pipeline), simulate(concat_costs(alone), pipeline)):
        for index, one in enumerate(alone):
            part, expected = together.columns(index, index + 1), simulate(one, pipeline)
            assert part.end_s.tolist() == expected.end_s.tolist()
            assert part.transfer_s.tolist() == expected.transfer_s.tolist()
            assert part.compute_s.tolist() == expected.compute_s.tolist()


def test_blocks_of_columns_make_one_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(num_stages=3, num_microbatches=6, num_virtual_stages=2)
    rng = np.random.default_rng(3)
    costs = pipeline_costs(
        rng.uniform(1, 2, (6, 203)), rng.uniform(1, 2, (6, 203)), num_virtual_stages=2
    )
    whole = simulate(costs, pipeline).end_s
    monkeypatch.setattr(simulation, "BLOCK_NBYTES", 0)
    assert simulation.LEAST_COLUMNS < 203 / 3
    assert simulate(costs, pipeline).end_s.tolist() == whole.tolist()


def test_a_late_start_delays_one_stage_only() -> None:
    costs = pipeline_costs([1.0], [2.0], start_s=[5.0])
    assert simulate(costs, 3).makespan_s[0] == 5 + 9


def test_costs_that_do_not_fit_the_pipeline_are_refused() -> None:
    pipeline = Pipeline(num_stages=2, num_microbatches=4, num_virtual_stages=2)
    with pytest.raises(ConfigError, match="costs have 4 stages and 4 chunks, the pipeline 2 and 4"):
        simulate(pipeline_costs([1.0] * 4, [1.0] * 4), pipeline)
